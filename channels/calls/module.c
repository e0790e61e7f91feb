/* The module `_calls`: the types Calls, Form and FlowCalls, and the types of experts' calls,
 * which a Calls object issues. */
#include "../expert_parallel/layer_form.h"
#include "calls.h"

static int add_types(PyObject* module) {
  if (proxyccl_name_array_attributes() != 0 || proxyccl_add_form(module) != 0 || proxyccl_add_calls(module) != 0)
    return -1;
  if (proxyccl_add_flow_calls(module) != 0 || proxyccl_add_form_list(module) != 0) return -1;
  if (proxyccl_add_descriptor(module) != 0 || proxyccl_add_sent_call(module) != 0) return -1;
  if (proxyccl_add_dispatch_form(module) != 0) return -1;
  return proxyccl_add_combine_form(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_types}, {0, NULL}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_calls",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__calls(void) { return PyModuleDef_Init(&definition); }
