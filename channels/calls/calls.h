/* Makes the calls of one group (table.c): finds each call's form by the call's signature, fills in the addresses, and
 * issues the call. The group's transfers between pairs of ranks have a type of their own (flow_calls.c). */
#ifndef PROXYCCL_CALLS_TABLE_H
#define PROXYCCL_CALLS_TABLE_H

#include "form.h"

/* Add the types Calls and FlowCalls to the module. Return 0, or -1 with an exception. */
int proxyccl_add_calls(PyObject* module);
int proxyccl_add_flow_calls(PyObject* module);
/* Returns whether an object is a Calls; if not, sets an exception. */
int proxyccl_require_calls(PyObject* object);
/* Returns the types of arrays that a Calls object takes. */
const ArrayTypes* proxyccl_types_of(PyObject* calls);
/* Adds `made` and `prepared` to the counts of a Calls object, for calls whose forms the object does not keep. */
void proxyccl_count(PyObject* calls, int made, int prepared);
/* Issues a call on a stream (NULL: the stream of the latest call), after the group's earlier calls. Returns 1 if the
 * call was issued; 0, with nothing done, if Python must issue the call; -1 with an exception. */
int proxyccl_issue_prepared(PyObject* calls, const PreparedCall* call, PyObject* stream);

#endif
