//! Commits of offsets, against appends of one record.

use anyhow::{Context, Result};
use futures_util::future::try_join_all;
use helix_client::{
    AssignedPartition, AutoCommit, GroupConsumer, OffsetToCommit, Producer, ProducerOptions,
};
use helix_proto::log::v1::Record;
use tokio::time::{Duration, Instant};

use super::plan::{GroupBenchPlan, settle};
use super::row::{GroupBenchRow, median};

/// Calls of one client.
struct CallTimes {
    seconds: Vec<f64>,
    /// From the first call to the end of the last one.
    elapsed: Duration,
}

/// A member whose offsets are committed.
struct CommittingClient {
    member: GroupConsumer,
    partition: AssignedPartition,
}

pub(super) async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let topic = plan.topic("commit");
    plan.create_topic(&topic).await?;
    let mut committing = Vec::with_capacity(plan.args.committers);
    let mut producers = Vec::with_capacity(plan.args.committers);
    for number in 0..plan.args.committers {
        producers.push(plan.client()?.producer(ProducerOptions::default()));
        let group = plan.client()?.consumer_group(plan.group("commit", number));
        let mut member = [group.topics([&topic]).auto_commit(AutoCommit::Off).join()];
        settle(&mut member, plan.args.partitions, true).await?;
        let [member] = member;
        let partition = member.assignment().into_iter().next().context("no partition")?;
        committing.push(CommittingClient { member, partition });
    }
    let (mut commit_p50, mut append_p50) = (Vec::new(), Vec::new());
    let (mut commit_rates, mut append_rates) = (Vec::new(), Vec::new());
    for _ in 0..plan.args.runs {
        let one = appends(plan, &topic, &producers[..1]).await?;
        append_p50.push(median(&one[0].seconds) * 1e3);
        let mut others = committing.split_off(1);
        let (one, first) = commits(plan, committing).await?;
        commit_p50.push(median(&one[0].seconds) * 1e3);
        committing = first;
        committing.append(&mut others);
        append_rates.push(rate(&appends(plan, &topic, &producers).await?));
        let (times, all) = commits(plan, committing).await?;
        commit_rates.push(rate(&times));
        committing = all;
    }
    for CommittingClient { member, .. } in committing {
        member.close().await?;
    }
    let clients = format!("commits/s of {} clients", plan.args.committers);
    Ok(vec![
        GroupBenchRow::new("CommitOffsets p50, one client", "ms", commit_p50)
            .against("append of one record, p50", append_p50),
        GroupBenchRow::new(clients, "1/s", commit_rates)
            .against("their appends/s of one record", append_rates),
    ])
}

fn rate(times: &[CallTimes]) -> f64 {
    let count: usize = times.iter().map(|it| it.seconds.len()).sum();
    let longest = times.iter().map(|it| it.elapsed.as_secs_f64()).fold(0.0, f64::max);
    count as f64 / longest
}

/// Commits one offset at a time with each of these members. A failed commit ends the run.
async fn commits(
    plan: &GroupBenchPlan,
    clients: Vec<CommittingClient>,
) -> Result<(Vec<CallTimes>, Vec<CommittingClient>)> {
    let duration = plan.args.duration;
    let tasks = clients.into_iter().map(|mut client| {
        tokio::spawn(async move {
            let begin = Instant::now();
            let mut seconds = Vec::new();
            while begin.elapsed() < duration {
                let since = Instant::now();
                // Each commit changes the offset; 0 and 1 are valid in an empty partition, too.
                let offset =
                    OffsetToCommit::new(client.partition.clone(), seconds.len() as u64 % 2);
                client.member.commit_offsets([offset]).await.context("commit")?;
                seconds.push(since.elapsed().as_secs_f64());
            }
            anyhow::Ok((CallTimes { seconds, elapsed: begin.elapsed() }, client))
        })
    });
    let mut ended = (Vec::new(), Vec::new());
    for task in try_join_all(tasks).await? {
        let (times, client) = task?;
        ended.0.push(times);
        ended.1.push(client);
    }
    Ok(ended)
}

/// Appends one record at a time with each of these producers. A failed append ends the run.
async fn appends(
    plan: &GroupBenchPlan,
    topic: &str,
    producers: &[Producer],
) -> Result<Vec<CallTimes>> {
    let duration = plan.args.duration;
    let tasks = producers.iter().zip((0..plan.args.partitions).cycle()).map(|(it, partition)| {
        let (producer, topic) = (it.clone(), topic.to_owned());
        tokio::spawn(async move {
            let record = Record { value: Some("x".into()), ..Record::default() };
            let begin = Instant::now();
            let mut seconds = Vec::new();
            while begin.elapsed() < duration {
                let since = Instant::now();
                let records = std::slice::from_ref(&record);
                producer.append(&topic, partition, records).await.context("append")?;
                seconds.push(since.elapsed().as_secs_f64());
            }
            anyhow::Ok(CallTimes { seconds, elapsed: begin.elapsed() })
        })
    });
    try_join_all(tasks).await?.into_iter().collect()
}
