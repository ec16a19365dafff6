//! Commits of offsets, against appends of one record.

use anyhow::Result;
use futures_util::future::try_join_all;
use helix_client::{
    AssignedPartition, AutoCommit, GroupConsumer, OffsetToCommit, Producer, ProducerOptions,
};
use helix_proto::log::v1::Record;
use tokio::time::Instant;

use super::{GroupBenchPlan, GroupBenchRow, median, settle};

pub(super) async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let mut members = Vec::with_capacity(plan.args.committers);
    for number in 0..plan.args.committers {
        let group = plan.client()?.consumer_group(plan.group("commit", number));
        let mut member = [group.topics([plan.topic()]).auto_commit(AutoCommit::Off).join()];
        settle(&mut member, plan.args.partitions).await?;
        members.extend(member);
    }
    let mut producers = Vec::with_capacity(plan.args.committers);
    for _ in 0..plan.args.committers {
        producers.push(plan.client()?.producer(ProducerOptions::default()));
    }
    let (mut commit_p50, mut append_p50) = (Vec::new(), Vec::new());
    let (mut commit_rates, mut append_rates) = (Vec::new(), Vec::new());
    for _ in 0..plan.args.runs {
        append_p50.push(median(&append(plan, 0, &producers[0]).await?));
        commit_p50.push(median(&commit(plan, &mut members[0]).await?));
        let appends = producers.iter().enumerate().map(|(lane, it)| append(plan, lane, it));
        append_rates.push(rate(plan, &try_join_all(appends).await?));
        let commits = members.iter_mut().map(|member| commit(plan, member));
        commit_rates.push(rate(plan, &try_join_all(commits).await?));
    }
    for member in members {
        member.close().await?;
    }
    let reference_name = "appends of a record";
    Ok(vec![
        GroupBenchRow {
            name: "commit p50, one member".to_owned(),
            value: median(&commit_p50) * 1e3,
            unit: "ms",
            reference_name,
            reference: Some(median(&append_p50) * 1e3),
        },
        GroupBenchRow {
            name: format!("commits of {} members", plan.args.committers),
            value: median(&commit_rates),
            unit: "1/s",
            reference_name,
            reference: Some(median(&append_rates)),
        },
    ])
}

fn rate(plan: &GroupBenchPlan, seconds: &[Vec<f64>]) -> f64 {
    let count: usize = seconds.iter().map(Vec::len).sum();
    count as f64 / plan.args.duration.as_secs_f64()
}

/// Returns the seconds of each commit until the time is over.
async fn commit(plan: &GroupBenchPlan, member: &mut GroupConsumer) -> Result<Vec<f64>> {
    let partition: AssignedPartition = member.assignment().swap_remove(0);
    let mut seconds = Vec::new();
    let begin = Instant::now();
    while begin.elapsed() < plan.args.duration {
        let since = Instant::now();
        let offset = OffsetToCommit::new(partition.clone(), 0);
        member.commit_offsets([offset]).await?;
        seconds.push(since.elapsed().as_secs_f64());
    }
    Ok(seconds)
}

async fn append(plan: &GroupBenchPlan, lane: usize, producer: &Producer) -> Result<Vec<f64>> {
    let topic = plan.topic();
    let partition = u32::try_from(lane)? % plan.args.partitions;
    let record = Record { value: Some("x".into()), ..Record::default() };
    let mut seconds = Vec::new();
    let begin = Instant::now();
    while begin.elapsed() < plan.args.duration {
        let since = Instant::now();
        producer.append(&topic, partition, std::slice::from_ref(&record)).await?;
        seconds.push(since.elapsed().as_secs_f64());
    }
    Ok(seconds)
}
