/* Includes the header first, to prove that it needs no other header. */
#include "hvd/c/hvd.h"

hvd_status_t start_and_stop(void);

hvd_status_t start_and_stop(void) {
  const hvd_options_t options = HVD_OPTIONS_INIT;
  const hvd_submission_t submission = HVD_SUBMISSION_INIT;
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_metrics_t metrics = HVD_METRICS_INIT;
  hvd_status_t status = hvd_init(&options);
  if (status == HVD_OK) status = hvd_run(&submission, NULL);
  if (status == HVD_OK) status = hvd_operation_result(NULL, &result);
  if (status == HVD_OK) status = hvd_get_metrics(&metrics);
  return status;
}
