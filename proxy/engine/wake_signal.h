/* A signal handler that wakes a thread: it writes to a descriptor, which that thread reads.
 *
 * Python's own handlers run in the main thread between two bytecodes, so not while that thread waits inside a call.
 * This handler is in C, and any thread may read the descriptor.
 */
#ifndef PROXYCCL_WAKE_SIGNAL_H
#define PROXYCCL_WAKE_SIGNAL_H

/* Makes `signal` add one to the eventfd and then call the previous handler, if any: MPI libraries install handlers.
 * Call it once in a process. Returns 0 or an errno. */
int proxyccl_wake_signal_install(int signal, int eventfd);
/* Restores the previous handler, unless somebody has installed another one since. */
void proxyccl_wake_signal_remove(int signal);

#endif
