/* The shipped engine that the scenarios run: what a worker does in its turn, over the copy transport; and the table by
 * which ranks learn of each other's memory. */
#include "announcements.c"
#include "copy_transport.c"
#include "drain.c"
#include "poll.c"
