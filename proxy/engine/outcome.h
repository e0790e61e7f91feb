/* The outcome of an attempt in the engine. */
#ifndef PROXYCCL_OUTCOME_H
#define PROXYCCL_OUTCOME_H

typedef enum ProxycclOutcome {
  WAITS = -1,   /* nothing was done for lack of room; the next poll may free some */
  CONTINUE = 0, /* success: the thread goes on */
  /* Why proxyccl_thread_run returned. The worker does not run again, except after PROXYCCL_EXIT_HANDLER. */
  PROXYCCL_EXIT_STOPPED = 1,   /* the worker was stopped, and its rings are empty */
  PROXYCCL_EXIT_HANDLER = 2,   /* `trigger` is for a Python handler: call it, then run the thread again */
  PROXYCCL_EXIT_ERROR = 3,     /* ProxycclExitInfo says what failed */
  PROXYCCL_EXIT_ABORTED = 4,   /* another rank or kernel set the abort word, or the worker was abandoned */
  PROXYCCL_EXIT_NO_WORKERS = 5 /* the thread has no worker to run */
} ProxycclOutcome;

#endif
