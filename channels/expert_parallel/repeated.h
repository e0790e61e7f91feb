/* The types of repeated_dispatch.c and repeated_combine.c. */
#ifndef PROXYCCL_REPEATED_H
#define PROXYCCL_REPEATED_H

#include "../prepared_calls.h"

/* Each adds its types to the module. 0, or -1 with an exception. */
int proxyccl_add_dispatch_form(PyObject* module);
int proxyccl_add_combine_form(PyObject* module);

#endif
