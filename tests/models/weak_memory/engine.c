/* The shipped engine that the scenarios run: a worker's turn, over the copy transport; the table through which ranks
 * learn of each other's memory; and their logs of collective calls. */
#include "announcements.c"
#include "calls.c"
#include "copy_transport.c"
#include "drain.c"
#include "poll.c"
