/* Makes the time of day jump forwards or backwards by up to a day at every reading, in processes that preload this
 * library. Monotonic clocks are unchanged. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { DAY = 86400 };

static time_t jump(void) {
  static _Atomic unsigned readings;
  const unsigned mixed = atomic_fetch_add(&readings, 1) * 2654435761u;
  return (time_t)(mixed >> 8) % (2 * DAY + 1) - DAY;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  const int status = (int)syscall(SYS_clock_gettime, clock, now);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
  return status;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  const int status = (int)syscall(SYS_gettimeofday, now, zone);
  if (status == 0) now->tv_sec += jump();
  return status;
}

time_t time(time_t* result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
