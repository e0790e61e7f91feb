/* Planted bugs: BUG(n) holds in a run whose environment has BUG=n, so that all bugs of a model cost one compilation. */
c_decl {
\#include <stdlib.h>
  int planted_bug;
};
#define BUG(n) c_expr { planted_bug == n }
#define CHOOSE_BUG c_code { planted_bug = getenv("BUG") == NULL ? 0 : atoi(getenv("BUG")); }
