#include "elastic/elastic_account.h"

#include <cstring>

#include "base/text.h"
#include "system/text.h"

namespace hvd::launcher {

std::string describe_end(const Ended& ended, const std::optional<Notice>& death) {
  if (ended.start_error != 0)
    return text("its program cannot be run: ", std::strerror(ended.start_error));
  std::string end = ended.signal != 0 ? text("killed by signal ", ended.signal, " (",
                                             signal_name(ended.signal), ")")
                                      : text("exit code ", ended.code);
  if (ended.code == 0) end += " before the end of the job";
  if (death && !death->text.empty())
    end += text(": ", trim(death->text.substr(0, death->text.find('\n'))));
  return end;
}

std::string final_message(const ElasticRecord& record) {
  std::string message;
  for (const LostWorker& worker : record.lost) {
    message += text("hvdrun: worker ", worker.id, " on ", worker.host, " was lost ");
    message += worker.generation == 0 ? std::string("before it was a rank")
                                      : text("in generation ", worker.generation);
    message += text(": ", worker.cause);
    if (worker.replacement != 0)
      message += text("; worker ", worker.replacement, " was started in its place");
    message += "\n";
  }
  if (record.reason.empty()) return message;
  message += text("hvdrun: ", record.reason, "\n");
  if (record.stderr_tail.empty()) return message;
  message += text("hvdrun: the last lines of worker ", record.tail_worker, "'s stderr:\n");
  for (const std::string& line : record.stderr_tail) message += text("  ", line, "\n");
  return message;
}

}  // namespace hvd::launcher
