// libhiprtc.so without an AMD GPU: "compiles" a kernel with the host's C++ compiler, for the host runtime. The image is
// a shared object.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "hip_api.h"

namespace {

struct Program {
  std::string source, log, image;
};

std::string readFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string quoted(const std::string& word) { return "'" + word + "'"; }

}  // namespace

HIP_EXPORT hiprtcResult hiprtcVersion(int* major, int* minor) {
  *major = 6;
  *minor = 4;
  return HIPRTC_SUCCESS;
}
HIP_EXPORT const char* hiprtcGetErrorString(hiprtcResult result) {
  return result == HIPRTC_SUCCESS ? "HIPRTC_SUCCESS" : "HIPRTC_ERROR";
}
HIP_EXPORT hiprtcResult hiprtcCreateProgram(hiprtcProgram* program, const char* source, const char*, int, const char**,
                                            const char**) {
  *program = new Program{source, "", ""};
  return HIPRTC_SUCCESS;
}
HIP_EXPORT hiprtcResult hiprtcDestroyProgram(hiprtcProgram* program) {
  delete static_cast<Program*>(*program);
  *program = nullptr;
  return HIPRTC_SUCCESS;
}
HIP_EXPORT hiprtcResult hiprtcCompileProgram(hiprtcProgram handle, int count, const char** options) {
  auto* program = static_cast<Program*>(handle);
  char pattern[] = "/tmp/hiprtc_on_host.XXXXXX";
  if (mkdtemp(pattern) == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  const std::string directory = pattern, source = directory + "/kernel.cpp", image = directory + "/kernel.so",
                    log = directory + "/log";
  std::ofstream(source) << program->source;
  const char* compiler = std::getenv("CXX");
  std::string command = compiler != nullptr ? compiler : "g++";
  for (int i = 0; i < count; ++i)
    if (std::strncmp(options[i], "--offload-arch", 14) != 0) command += " " + quoted(options[i]);
  // Behind the caller's -O3: a test compiles more than it runs.
  command += " -O1 -fPIC -shared -fvisibility=hidden " + quoted(source) + " -o " + quoted(image) + " 2>" + quoted(log);
  const int status = std::system(command.c_str());
  program->log = readFile(log);
  program->image = readFile(image);
  for (const auto& path : {source, image, log}) unlink(path.c_str());
  rmdir(directory.c_str());
  return status == 0 ? HIPRTC_SUCCESS : HIPRTC_ERROR_COMPILATION;
}
HIP_EXPORT hiprtcResult hiprtcGetProgramLogSize(hiprtcProgram program, size_t* bytes) {
  *bytes = static_cast<Program*>(program)->log.size() + 1;
  return HIPRTC_SUCCESS;
}
HIP_EXPORT hiprtcResult hiprtcGetProgramLog(hiprtcProgram program, char* log) {
  std::strcpy(log, static_cast<Program*>(program)->log.c_str());
  return HIPRTC_SUCCESS;
}
HIP_EXPORT hiprtcResult hiprtcGetCodeSize(hiprtcProgram program, size_t* bytes) {
  *bytes = static_cast<Program*>(program)->image.size();
  return HIPRTC_SUCCESS;
}
HIP_EXPORT hiprtcResult hiprtcGetCode(hiprtcProgram program, char* code) {
  const std::string& image = static_cast<Program*>(program)->image;
  std::memcpy(code, image.data(), image.size());
  return HIPRTC_SUCCESS;
}
