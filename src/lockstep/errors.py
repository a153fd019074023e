"""The classes of Lockstep's errors, for programs that catch them.

LockstepError                     the message says who, what, where, and what to do
├── UsageError                    exit status 2: usage error; nothing was started
│   ├── LaunchEnvironmentError    environment variables that contradict each other
│   ├── LayoutError               a layout that the numbers, the model or the machine do not allow
│   └── DatasetError              a dataset that cannot be used as requested
└── WorkError                     exit status 1: the work failed
    ├── RankError                 a rank raised, exited or was killed
    ├── RendezvousError           ranks that did not connect in time
    ├── DisagreementError         ranks hold different models, data or settings
    ├── FileError                 a damaged data file, or a file that cannot be read or written
    ├── SampleError               the dataset raised while a sample was loaded
    ├── LossError                 a loss that is not a scalar, is not finite, or raised an error
    ├── GradientError             a gradient that cannot be added exactly
    ├── BufferMismatchError       a buffer whose results cannot be merged
    ├── StateError                a step wrote parameters or drew from private generators
    ├── StoppedError              another rank of a pipeline failed and reported it
    └── CommunicationError        a collective call or message failed
        └── LostError             another rank is gone, or cannot be reached
"""

from lockstep.kernel.errors import *  # noqa: F403
from lockstep.kernel.errors import __all__ as __all__
