//! Appends without a stream, while all streams are in use: one batch of a lane at a time.

use helix_client::Error;
use helix_client::proto::log::v1::batch::Form;
use helix_client::proto::log::v1::{AppendRequest, Batch};
use tokio::time::timeout;

use super::stream::{LaneTask, OPEN_ATTEMPTS, OPEN_WAIT, SILENCE_MAX, timed_out};
use super::{LaneBatch, StoredOffsets};

impl LaneTask {
    /// Appends a batch with a call. Tries again only what was certainly not stored.
    pub(super) async fn append_single(&self, batch: &LaneBatch) -> Result<StoredOffsets, Error> {
        // The semaphore is never closed.
        let _permit = self.state.single_appends.acquire().await.ok();
        let mut attempt = 1;
        loop {
            let appending = self.try_append_single(batch);
            match timeout(SILENCE_MAX, appending).await {
                Ok(Err(error))
                    if error.retryable && !error.may_have_applied && attempt < OPEN_ATTEMPTS =>
                {
                    tokio::time::sleep(OPEN_WAIT).await;
                }
                Ok(result) => return result,
                Err(_) => return Err(timed_out("append")),
            }
            attempt += 1;
        }
    }

    async fn try_append_single(&self, batch: &LaneBatch) -> Result<StoredOffsets, Error> {
        let client = self.upstream.client();
        let route = client.route(&self.key.topic, self.key.partition).await?;
        let request = AppendRequest {
            topic: self.key.topic.clone(),
            partition: self.key.partition,
            batch: Some(Batch { form: Some(Form::Encoded(batch.batch.clone())) }),
            durability: self.key.durability().into(),
            producer: self.key.identity(),
            first_sequence: batch.sequence.map(|sequence| self.widen(sequence)),
            condition: None,
            topic_id: 0,
            report_stages: false,
        };
        let request = helix_transport::requests::append(request);
        match route.connection.produce().append(request).await {
            Ok(response) => {
                let response = response.into_inner();
                Ok(StoredOffsets {
                    first: response.ack.and_then(|ack| ack.first_offset),
                    log_start: response.watermarks.map(|watermarks| watermarks.log_start_offset),
                })
            }
            Err(status) => {
                let error = Error::from(status);
                client.report_failure(&route, &error);
                Err(error)
            }
        }
    }
}
