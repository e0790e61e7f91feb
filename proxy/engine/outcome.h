/* The result of an engine function: whether proxyccl_thread_run continues, and why not. */
#pragma once

typedef enum ProxycclOutcome {
  WAITS = -1,   /* a queue was full, so nothing was done; the next poll may make room */
  CONTINUE = 0, /* success: proxyccl_thread_run continues */
  /* The reasons for which proxyccl_thread_run returns. Only after PROXYCCL_EXIT_HANDLER may the worker run again. */
  PROXYCCL_EXIT_STOPPED = 1,   /* the worker was stopped, and its rings are empty */
  PROXYCCL_EXIT_HANDLER = 2,   /* ProxycclExitInfo.trigger is for a Python handler: call the handler, then run the
                                  thread again */
  PROXYCCL_EXIT_ERROR = 3,     /* ProxycclExitInfo describes the failure */
  PROXYCCL_EXIT_ABORTED = 4,   /* another rank or kernel set the abort word, or the worker was abandoned */
  PROXYCCL_EXIT_NO_WORKERS = 5 /* the thread has no worker to run */
} ProxycclOutcome;
