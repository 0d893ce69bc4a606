"""From the teacher to the students: label store, distillation losses, shared tables, transfer ratio."""
