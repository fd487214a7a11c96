"""The mode under which forward runs while it is traced: layers and functions in a form that can be traced."""
