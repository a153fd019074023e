"""Tools on the engine: commands, checks, replays, reports, recipes and the driver.

Nothing outside of this package imports them.
"""
