"""Scripts that start things from a checkout; not part of the installed package."""
