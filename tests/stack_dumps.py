"""What Python's fault handler writes about a rank, for the tests that read it."""

from lockstep.launcher import stacks
from lockstep.user_code import NOT_USER_CODE

DUMP = """\
Current thread 0x00007f (most recent call first):
  File "{torch}/torch/distributed/distributed_c10d.py", line 3168 in all_reduce
  File "{torch}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 31 in step
  File "/home/me/train.py", line 60 in <module>
  File "{launcher}/rank_process.py", line 9 in run_code
""".format(torch=f"{NOT_USER_CODE[0]}/site-packages", launcher=stacks.LAUNCHER)
