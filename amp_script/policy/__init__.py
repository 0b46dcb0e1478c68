"""What autocast does to an operator on a device: the tables, and the observer that proves them."""
