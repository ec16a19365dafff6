//! Reads every partition of every replica from its log start to its high watermark, past routing
//! and retries: what each node says, now.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use helix_checker::{Event, payload};
use helix_client::Error;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{
    ErrorReason, FetchRequest, PartitionRecords, PartitionStart, ReadSource, StartPosition,
};
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use crate::net::{CLIENT_PORT, channel};
use crate::plan::Plan;
use crate::workload::{FINALS, Scene, TOPIC};

const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Attempts at one fetch.
const ATTEMPTS_MAX: u32 = 20;

/// Where the events of a read go: they count only if nothing changed meanwhile.
pub type Found = Arc<Mutex<Vec<Event>>>;

/// Reads all replicas, each time that it is asked to.
pub async fn read(scene: Scene, rounds: u32, found: Found) -> turmoil::Result {
    for round in 0..rounds {
        scene.turn(FINALS + round).await;
        read_all(&scene, round, &found).await?;
        scene.on_end();
    }
    Ok(())
}

async fn read_all(scene: &Scene, round: u32, found: &Found) -> turmoil::Result {
    let mut events = Vec::new();
    for node in scene.members.all() {
        let host = Plan::host(node);
        let endpoint = Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))?;
        let client = ConsumeServiceClient::new(channel(&endpoint));
        let client = client.max_decoding_message_size(16 << 20);
        let reader = scene.id();
        for partition in 0..scene.plan.partitions {
            events.push(Event::FinalOpened { reader, partition, round, replica: node });
            read_one(client.clone(), (reader, partition), &mut events)
                .await
                .map_err(|why| format!("partition {partition} of node {node}: {why}"))?;
        }
    }
    *found.lock().map_err(|_| "a reader panicked")? = events;
    Ok(())
}

async fn read_one(
    mut client: ConsumeServiceClient<Channel>,
    (reader, partition): (u32, u32),
    events: &mut Vec<Event>,
) -> Result<(), String> {
    let mut offset = 0;
    let mut attempts = 0;
    loop {
        let records = match fetch(&mut client, partition, offset).await {
            Ok(records) => records,
            Err(Some(error)) if error.is(ErrorReason::OffsetOutOfRange) => {
                let marks = error.watermarks.unwrap_or_default();
                if offset == 0 && marks.log_start_offset > 0 {
                    offset = marks.log_start_offset;
                    events.push(Event::FinalStarts { reader, partition, offset });
                    continue;
                }
                events.push(Event::OutOfRange { reader, partition, offset });
                events.push(Event::FinalEnded { reader, partition, high_watermark: offset });
                return Ok(());
            }
            Err(error) => {
                attempts += 1;
                if attempts > ATTEMPTS_MAX {
                    return Err(error.map_or("no answer".to_owned(), |error| error.to_string()));
                }
                sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let high_watermark = records.watermarks.unwrap_or_default().high_watermark;
        let (told, end) = payload::events(reader, partition, &records.batches, offset);
        let is_stuck = end == offset;
        events.extend(told);
        offset = end;
        // Nothing comes although there should be more: the checker sees the gap.
        if end >= high_watermark || is_stuck {
            events.push(Event::FinalEnded { reader, partition, high_watermark });
            return Ok(());
        }
    }
}

/// `None` where no answer came.
async fn fetch(
    client: &mut ConsumeServiceClient<Channel>,
    partition: u32,
    offset: u64,
) -> Result<PartitionRecords, Option<Error>> {
    let start = PartitionStart {
        topic: TOPIC.to_owned(),
        partition,
        start: Some(StartPosition { position: Some(Position::Offset(offset)) }),
        until_offset: None,
    };
    let request = FetchRequest {
        partitions: vec![start],
        source: ReadSource::AnyReplica.into(),
        accept_encoded: true,
        ..FetchRequest::default()
    };
    match timeout(ANSWER_MAX, client.fetch(request)).await {
        Ok(Ok(answer)) => Ok(answer.into_inner().partitions.pop().unwrap_or_default()),
        Ok(Err(status)) => Err(Some(Error::from_status(&status))),
        Err(_) => Err(None),
    }
}
