/* A scenario: some threads' actions with the shipped code, and properties that must hold for every schedule. */
#ifndef PROXYCCL_SCENARIO_H
#define PROXYCCL_SCENARIO_H

#include <stdint.h>

struct Scenario {
  const char* name;
  uint32_t threads;             /* 2 to 4 */
  void (*begin)();              /* before each execution: sets initial values, declares words */
  void (*run)(uint32_t thread); /* each thread's part */
};

extern const Scenario kScenarios[];
extern const unsigned kScenarioCount;

#endif
