"""Claims written as YAML -> holds, does not hold, cannot be determined."""
