"""Many runs of one preset, with something changed in each: ablations and scaling."""
