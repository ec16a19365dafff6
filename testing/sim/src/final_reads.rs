//! Reads every partition of every replica from its log start to its high watermark, directly from
//! each node, without routing.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use helix_checker::{HistoryEvent, payload};
use helix_client::Error;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{
    ErrorReason, FetchRequest, PartitionRecords, PartitionStart, ReadSource, StartPosition,
};
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use crate::cluster::SimulatedMachine;
use crate::net::{CLIENT_PORT, channel};
use crate::plan::SimulationPlan;
use crate::workload::{ClientContext, FINALS, TOPIC};

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum attempts of one fetch.
const ATTEMPTS_MAX: u32 = 20;

/// Events of a full read. They count only if no log changed during the read.
pub type FinalReadEvents = Arc<Mutex<Vec<HistoryEvent>>>;

/// Reads all replicas in each final phase.
pub async fn read(
    context: ClientContext,
    machines: Vec<SimulatedMachine>,
    rounds: u32,
    found: FinalReadEvents,
) -> turmoil::Result {
    for round in 0..rounds {
        context.wait_for_phase(FINALS + round).await;
        read_all(&context, &machines, round, &found).await?;
        context.on_end();
    }
    Ok(())
}

async fn read_all(
    context: &ClientContext,
    machines: &[SimulatedMachine],
    round: u32,
    found: &FinalReadEvents,
) -> turmoil::Result {
    let mut events = Vec::new();
    let members = context.members.all();
    for machine in machines.iter().filter(|it| members.contains(&it.node_id())) {
        let node = machine.node_id();
        let host = SimulationPlan::host(node);
        let endpoint = Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))?;
        let client = ConsumeServiceClient::new(channel(&endpoint));
        let client = client.max_decoding_message_size(16 << 20);
        let reader = context.id();
        for partition in 0..context.plan.partitions {
            let is_here = || machine.node().is_some_and(|it| it.locate(TOPIC, partition).is_ok());
            if context.plan.placement.is_some() && !is_here() {
                continue;
            }
            events.push(HistoryEvent::FinalOpened { reader, partition, round, replica: node });
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
    events: &mut Vec<HistoryEvent>,
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
                    events.push(HistoryEvent::FinalStarts { reader, partition, offset });
                    continue;
                }
                events.push(HistoryEvent::OutOfRange { reader, partition, offset });
                events.push(HistoryEvent::FinalEnded { reader, partition, high_watermark: offset });
                return Ok(());
            }
            Err(error) => {
                attempts += 1;
                if attempts > ATTEMPTS_MAX {
                    return Err(error.map_or("no response".to_owned(), |error| error.to_string()));
                }
                sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let high_watermark = records.watermarks.unwrap_or_default().high_watermark;
        let (read, end) = payload::events(reader, partition, &records.batches, offset);
        let is_stuck = end == offset;
        events.extend(read);
        offset = end;
        // Ends on an empty response below the high watermark: the checker reports the gap.
        if end >= high_watermark || is_stuck {
            events.push(HistoryEvent::FinalEnded { reader, partition, high_watermark });
            return Ok(());
        }
    }
}

/// Fetches once. The error is `None` if no response came in time.
async fn fetch(
    client: &mut ConsumeServiceClient<Channel>,
    partition: u32,
    offset: u64,
) -> Result<PartitionRecords, Option<Error>> {
    let start = PartitionStart {
        topic: TOPIC.to_owned(),
        partition,
        start: Some(StartPosition {
            position: Some(Position::Offset(offset)),
            ..StartPosition::default()
        }),
        until_offset: None,
        topic_id: 0,
    };
    let request = FetchRequest {
        partitions: vec![start],
        source: ReadSource::AnyReplica.into(),
        accept_encoded: true,
        ..FetchRequest::default()
    };
    match timeout(RESPONSE_TIMEOUT, client.fetch(request)).await {
        Ok(Ok(response)) => Ok(response.into_inner().partitions.pop().unwrap_or_default()),
        Ok(Err(status)) => Err(Some(Error::from_status(&status))),
        Err(_) => Err(None),
    }
}
