/* Prints the constants that the models share with the shipped headers. */
#include <stdio.h>

#include "proxyccl/control.h"
#include "staged_transport.h"

#define PRINT(name) printf("#define %s %d\n", #name, (int)(name))

int main(void) {
  PRINT(PROXYCCL_STAGED_MESSAGES);
  PRINT(PROXYCCL_PRESENT);
  PRINT(PROXYCCL_CLOSING_ANOTHER);
  PRINT(PROXYCCL_LEFT);
  return 0;
}
