"""`ssl-bench check`: the seven points that prove a method, as one table."""
