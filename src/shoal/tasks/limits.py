"""The limits of tasks: sizes are bytes, times seconds."""

ARGS_MAX = 64 << 20  # the arguments of a call, positional and named each
RESULT_MAX = 256 << 20  # what a call returns; as much as a frame of any wire carries
BLOB_MIN = 256 << 10  # an argument from this size on travels apart, once
BLOB_MAX = 256 << 20
DEPTH_MAX = 64  # levels of values in values: beyond, it is mostly a cycle

TRACEBACK_MAX = 64 << 10  # characters; of a longer one the middle is left out
PROGRESS_TEXT_MAX = 200  # characters of what a call says of its progress
PROGRESS_INTERVAL = 0.05  # between two words on progress; those between are dropped

START_TIMEOUT = 60.0  # for a process to import the modules with the tasks
CLUSTER_START_TIMEOUT = 120.0  # for a cluster to be reached and to import them
CLOSE_TIMEOUT = 5.0  # for what is connected to a cluster to say good-bye
RESTART_DELAY = 1.0  # before another process is tried in the place of one that failed
OUTPUT_DRAIN_TIMEOUT = 0.5  # for what a process said to be read once it has ended
STDERR_MAX = 4096  # of a process's standard error, for messages
STDERR_LINES_MAX = 5  # that such a message quotes
PROCESSES_MAX = 1024

FLUSH_DELAY = 0.001  # that a return may wait for others, to be told together
SENT_AHEAD_MAX = 512  # calls of a lane that are at its process, beyond the running one
SENT_AHEAD_BYTES = 1 << 20  # of arguments that are there, or one call
STREAM_CALLS_MAX = 8192  # calls of a lane that wait here; nobody has use for as many
RECALL_GRACE = 0.1  # that a recalled call may go on by itself before it is stopped
WAITING_MAX = 4096  # calls that wait for a process

BLOBS_MAX = 4 << 30  # of large arguments that are kept, in files
BLOB_TIMEOUT = 30.0  # for one that is lacking to be given
MAPPED_MAX = 64  # of those, how many a process holds on to
FUNCTIONS_MAX = 256  # that were sent along and that a process remembers
