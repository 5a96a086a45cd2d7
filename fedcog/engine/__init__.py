"""Local training of many clients on one device, and the aggregation of what they send."""
