"""What crosses the network, and how: gradient reduction in int8."""
