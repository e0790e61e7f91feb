/* Compiles the parts of the shipped engine that the scenarios run: the worker, the copy transport, announcements of
 * memory, and the logs of collective calls. */
#include "announcements.c"
#include "calls.c"
#include "copy_transport.c"
#include "drain.c"
#include "poll.c"
