"""Tools that several chapters use to inspect, simulate and measure the engine."""
