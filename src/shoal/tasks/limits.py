"""The limits of tasks: sizes are bytes, times seconds."""

ARGS_MAX = 64 << 20  # the arguments of a call, positional and named each
RESULT_MAX = 256 << 20  # what a call returns; as much as a frame of any wire carries
BLOB_MIN = 256 << 10  # an argument from this size on travels apart, once
BLOB_MAX = 256 << 20
DEPTH_MAX = 64  # nesting levels; a deeper value is mostly a cycle

TRACEBACK_MAX = 64 << 10  # characters; the middle of a longer one is cut out
EXCEPTION_MAX = 64 << 10  # bytes of the record of an exception; the rest is left out
PROGRESS_TEXT_MAX = 200  # characters of a progress remark
PROGRESS_INTERVAL = 0.05  # between progress reports; others are dropped

START_TIMEOUT = 60.0  # for a process to import the modules with the tasks
CLUSTER_START_TIMEOUT = 120.0  # for a cluster to be reached and to import them
CLOSE_TIMEOUT = 5.0  # for a connection to a cluster to close
RESTART_DELAY = 1.0  # before a failed start of a process is repeated
OUTPUT_DRAIN_TIMEOUT = 0.5  # to read the output of an exited process
STDERR_MAX = 4096  # of a process's standard error, for messages
STDERR_LINES_MAX = 5  # that such a message quotes
PROCESSES_MAX = 1024
LENT_MAX = 256  # slots of tasks that wait for calls of their own, and so are lent
SPARE_TIMEOUT = 30.0  # until a process beyond the slots ends

FLUSH_DELAY = 0.001  # for which a return waits for others, to share a message
SENT_AHEAD_MAX = 512  # calls of a stream that its process holds, beyond the running one
SENT_AHEAD_BYTES = 1 << 20  # of their arguments, or one call
STREAM_CALLS_MAX = 8192  # queued calls of a stream
STREAM_TURN = 0.1  # for which a busy stream keeps its process while others wait
SHARERS_MAX = 64  # coordinators whose streams share the processes of a worker
RECALL_GRACE = 0.1  # for a recalled call to end by itself before its process is killed
WAITING_MAX = 4096  # calls that wait for a process

BLOBS_MAX = 4 << 30  # of large arguments in the file cache
BLOB_TIMEOUT = 30.0  # for the coordinator to send one
MAPPED_MAX = 64  # number of them that a process keeps open, or mapped
FUNCTIONS_MAX = 256  # sent by clients, that a process caches
