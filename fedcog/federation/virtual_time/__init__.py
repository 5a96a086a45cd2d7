"""Virtual time: how long simulated clients take, and asynchronous rounds on that clock."""
