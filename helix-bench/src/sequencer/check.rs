//! Checks of the stream's promises: one order for all, without gap or double, also over cut
//! connections and a change of leader.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use helix_client::Client;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

use super::cut::ConnectionCutter;
use super::node::{DELIVERY_TIMEOUT, EventStream, ReceivedStream, StreamReceiver, StreamSender};
use super::order::StreamOrder;
use crate::budget::SendBudget;
use crate::load::BenchLoad;
use crate::meter::LoadMeter;
use crate::target::{self, BenchTarget};
use crate::{interrupt, progress};

/// Node whose connections are cut.
const CUT_LANE: usize = 0;

/// One check and its outcome.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct CheckStep {
    name: &'static str,
    pub(super) outcome: CheckOutcome,
    detail: String,
}

/// Outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) enum CheckOutcome {
    Passed,
    Failed,
    NotPossible,
}

impl CheckStep {
    fn not_possible(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, outcome: CheckOutcome::NotPossible, detail: detail.into() }
    }

    /// Fails if the order has a violation or differs from that of another subscriber.
    fn compare(name: &'static str, one: &ReceivedStream, other: &ReceivedStream, end: u64) -> Self {
        let findings = one.findings(end);
        let is_equal = one.order.hash() == other.order.hash();
        let is_good = is_equal && findings.is_clean() && one.failures.count == 0;
        let mut detail = format!(
            "{} messages, {} lost, {} doubled, {} unknown, order {}",
            findings.records,
            findings.lost,
            findings.doubled,
            findings.unknown,
            if is_equal { "equal" } else { "DIFFERENT" },
        );
        if let Some(error) = &one.failures.first {
            detail = format!("{detail}; {error}");
        }
        let outcome = if is_good { CheckOutcome::Passed } else { CheckOutcome::Failed };
        Self { name, outcome, detail }
    }
}

/// Runs all checks over one stream while all nodes publish to it.
///
/// # Errors
/// The cluster cannot be reached, or a task panicked.
pub(super) async fn run(load: &BenchLoad, target: &BenchTarget) -> Result<Vec<CheckStep>> {
    ensure!(load.cluster.tls.is_none(), "--check cuts its own connections, which have no TLS");
    let stream = EventStream::at_end(load, target).await?;
    let total = load.run.records.context("the check has a number of messages")?;
    let budget = SendBudget::closed_loop(load.run);
    let cutter = ConnectionCutter::new();
    let cut_client =
        Client::new(helix_client::Config { dial: cutter.dial(), ..target::config(load) })?;
    let (end, ended) = watch::channel(None);
    let receiver = |order, own, progress| StreamReceiver {
        order,
        epoch: stream.epoch,
        end: ended.clone(),
        own,
        measured: None,
        progress,
    };
    let (progress, mut reached) = watch::channel(stream.start);
    let (mut senders, mut receivers) = (JoinSet::new(), Vec::new());
    for lane in 0..load.clients {
        let client = if lane == CUT_LANE { &cut_client } else { target.client(lane) };
        let window = Arc::new(Semaphore::new(load.in_flight));
        let lane_number = u32::try_from(lane).expect("the number of nodes is limited");
        let order = StreamOrder::from_start(stream.run, stream.start);
        let progress = (lane != CUT_LANE).then(|| progress.clone());
        let receiver = receiver(order, Some((lane_number, window.clone())), progress);
        receivers.push(tokio::spawn(receiver.run(stream.subscribe(client, stream.start))));
        let client = client.clone();
        let sender = StreamSender::new(&stream, load, client, lane_number, budget.clone(), window);
        senders.spawn(sender.run());
    }
    let share = |of: f64| stream.start + (total as f64 * of) as u64;
    wait_for(&mut reached, share(0.2)).await;
    let late_start = *reached.borrow();
    let late = StreamOrder::late(stream.run, late_start);
    let late = receiver(late, None, None).run(stream.subscribe(&target.observer, late_start));
    let late = tokio::spawn(late);
    for of in [0.3, 0.4, 0.5] {
        wait_for(&mut reached, share(of)).await;
        cutter.cut();
    }
    wait_for(&mut reached, share(0.6)).await;
    let failover = transfer(target).await;
    let mut sent = LoadMeter::new();
    while let Some(ended) = senders.join_next().await {
        sent.merge(&ended.context("a publisher has failed")?);
    }
    let log_end = target.ends().await?.first().map_or(0, |end| end.offset);
    end.send_replace(Some(log_end));
    let mut nodes = Vec::with_capacity(receivers.len());
    for receiver in receivers {
        nodes.push(joined(receiver).await?);
    }
    let late = joined(late).await?;
    progress::step("reading the stream again");
    let rewind = |order: StreamOrder| {
        let from = order.next_offset();
        receiver(order, None, None).run(stream.subscribe(&target.observer, from))
    };
    let again = rewind(StreamOrder::from_start(stream.run, stream.start)).await;
    let late_again = rewind(StreamOrder::late(stream.run, late_start)).await;

    let mut steps = vec![published(&sent, log_end - stream.start)];
    for node in nodes.iter().skip(CUT_LANE + 1) {
        steps.push(CheckStep::compare("total order", node, &again, log_end));
    }
    steps.push(CheckStep::compare("rewind", &again, &nodes[nodes.len() - 1], log_end));
    steps.push(CheckStep::compare("late join", &late, &late_again, log_end));
    steps.push(CheckStep::compare("cut connections", &nodes[CUT_LANE], &again, log_end));
    steps.push(match failover {
        Ok(()) => CheckStep::compare("change of leader", &again, &nodes[CUT_LANE], log_end),
        Err(why) => CheckStep::not_possible("change of leader", why),
    });
    Ok(steps)
}

/// Each acked message must be in the log, and no publisher may fail.
fn published(sent: &LoadMeter, in_log: u64) -> CheckStep {
    let is_good = sent.failures.count == 0 && sent.records == in_log;
    let mut detail = format!("{} messages acked, {in_log} in the log", sent.records);
    if let Some(error) = &sent.failures.first {
        detail = format!("{detail}; {error}");
    }
    let outcome = if is_good { CheckOutcome::Passed } else { CheckOutcome::Failed };
    CheckStep { name: "publish", outcome, detail }
}

/// Waits until a subscriber has reached the offset. Without progress the check continues, and
/// reports what was lost.
async fn wait_for(reached: &mut watch::Receiver<u64>, offset: u64) {
    let arrival = timeout(DELIVERY_TIMEOUT, reached.wait_for(|reached| *reached >= offset));
    tokio::select! {
        // Ignored: the checks find what did not arrive.
        _ = arrival => {}
        () = interrupt::requested() => {}
    }
}

/// Transfers leadership of the stream, or says why not.
async fn transfer(target: &BenchTarget) -> Result<(), String> {
    if target.topic.replication_factor < 2 {
        return Err("the topic has one replica".to_owned());
    }
    let shard = target.topic.partitions.first().map_or(0, |partition| partition.shard_id);
    let moved = target.observer.admin().transfer_leader(shard, None).await;
    moved.map(|_| ()).map_err(|error| format!("leadership was not transferred: {error}"))
}

async fn joined(task: JoinHandle<ReceivedStream>) -> Result<ReceivedStream> {
    task.await.context("a subscriber has failed")
}
