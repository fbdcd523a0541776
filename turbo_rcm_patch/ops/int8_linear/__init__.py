"""A Linear in int8."""
