/* Makes the transfers between pairs of ranks of one group (channels/collectives/DESIGN.md): reads the arguments from
 * Python objects, cuts each call into launches, and issues the launches in the order of their flows.
 */
#ifndef PROXYCCL_FLOW_CALLS_H
#define PROXYCCL_FLOW_CALLS_H

#include "form.h"

/* Adds the type FlowCalls to the module. Returns 0, or -1 with an exception. */
int proxyccl_add_flow_calls(PyObject* module);

#endif
