/* Memory that a checker of C++'s memory model simulates: each load may return any value that the model allows.
 *
 * Only words that were declared are simulated. All others are private to a thread or never change; an atomic access to
 * one that was not declared at all is an error of the scenario and ends the exploration. Plain C, like the engine.
 */
#ifndef PROXYCCL_CHECKED_MEMORY_H
#define PROXYCCL_CHECKED_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The source location of an access, for the trace. */
typedef struct {
  const char *function, *file;
  int line;
} CheckedSite;

#define CHECKED_HERE ((CheckedSite){__func__, __FILE__, __LINE__})

/* -- declarations, at the beginning of each execution; the words keep the value that they have --- */

/* A word of atomic accesses. */
void checked_atomic(void* word, size_t bytes);
/* The same, but stores may never make it smaller. */
void checked_growing(void* word, size_t bytes);
/* The two words of a slot that is stored in one access of 16 bytes. */
void checked_wide(void* words);
/* An 8-byte word of data: two accesses, one of them a store, are a race unless one happens before the other. */
void checked_data(void* word);
/* Memory whose accesses are not simulated. */
void checked_private(void* begin, size_t bytes);

/* -- atomic accesses, with orders as the compiler has them (__ATOMIC_RELAXED, …) --- */

uint64_t checked_load(const volatile void* word, size_t bytes, int order, CheckedSite site);
void checked_store(volatile void* word, uint64_t value, size_t bytes, int order, CheckedSite site);
uint64_t checked_exchange(volatile void* word, uint64_t value, size_t bytes, int order, CheckedSite site);
uint64_t checked_fetch_add(volatile void* word, uint64_t value, size_t bytes, int order, CheckedSite site);
bool checked_compare_exchange(volatile void* word, void* expected, uint64_t desired, size_t bytes, int success,
                              int failure, CheckedSite site);
void checked_store_wide(void* words, uint64_t low, uint64_t high, int order, CheckedSite site);
void checked_fence(int order, CheckedSite site);

/* -- data --- */

uint64_t checked_read(const void* word, CheckedSite site);
void checked_write(void* word, uint64_t value, CheckedSite site);
/* memcpy; declared words in the source are read as they were declared, atomic ones relaxed. */
void checked_copy(void* to, const void* from, size_t bytes, CheckedSite site);

/* -- threads --- */

uint32_t checked_thread(void);
/* In a loop that waits: lets other threads run. */
void checked_yield(CheckedSite site);
/* The address that replaces this thread's stack frame: its Fiber is where platform_host.h looks for it. */
void* checked_frame(void);

/* Number of the planted bug that this run has; 0: none. See tests/support/models/planted_bugs.py. */
extern int checked_planted;

/* Ends the exploration with a trace unless `condition` holds. */
void checked_assert(bool condition, const char* text, CheckedSite site);
#define CHECK(condition) checked_assert((condition), #condition, CHECKED_HERE)

#ifdef __cplusplus
}
#endif

#endif
