"""Tools on the engine: commands, checks, replays, reports, recipes and the driver.

Nothing else imports them, except the command line (`lockstep.cli`), which loads a command when it
is called, and `ls.Driver`.
"""
