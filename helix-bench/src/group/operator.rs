//! Measurements that need an operator: a coordinator that is killed, a node that is restarted.
//!
//! A command of the user does that. The shell that runs it has the node in `HELIX_NODE_ID` and
//! `HELIX_NODE_ADDR`.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use helix_client::{
    AssignedPartition, Client, Event, GroupConsumer, GroupEvent, Position, ReadOptions, ReadStart,
    StartPolicy, Subscription,
};
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::memory;
use super::plan::{GroupBenchPlan, STEP_MAX, settle};
use super::record_load::RecordLoad;
use super::row::GroupBenchRow;
use crate::progress;

/// Groups to try until one has a coordinator that does not lead all partitions.
const GROUPS_TRIED: usize = 32;

/// Limit of one attempt to reach a restarted node, and the pause between attempts.
const ATTEMPT_MAX: Duration = Duration::from_millis(200);
const ATTEMPT_PAUSE: Duration = Duration::from_millis(5);

/// A member whose coordinator does not lead all of its partitions.
struct SteadyMember {
    member: GroupConsumer,
    group: String,
    coordinator: u64,
    coordinator_addr: String,
    /// Partitions that another node leads.
    partitions: Vec<u32>,
}

/// Kills a coordinator, and measures pauses of partitions that other nodes lead.
pub(super) async fn kill_coordinator(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let command = plan.args.kill_command.as_deref().context("--kill-command is missing")?;
    let topic = plan.topic("coordinator");
    plan.create_topic(&topic).await?;
    let client = plan.client()?;
    let mut steady = steady_member(plan, &client, &topic).await?;
    let mut load = RecordLoad::start(plan, &topic, steady.partitions.iter().copied())?;
    let owned = steady.member.assignment();
    // The same partitions without a group: pauses of the cluster are none of the member.
    let starts = steady.partitions.iter().map(|it| ReadStart::new(&topic, *it, Position::Latest));
    let mut plain = plan.client()?.consumer().subscribe(starts.collect(), ReadOptions::default());
    // Every partition flows first.
    longest_gaps(&mut steady, &mut plain, plan.args.duration).await?;
    let (before, plain_before) = longest_gaps(&mut steady, &mut plain, plan.args.duration).await?;
    load.check()?;
    let (id, addr) = (steady.coordinator, steady.coordinator_addr.clone());
    progress::step(&format!("killing the coordinator, node {id} at {addr}"));
    // A member whose heartbeats failed would stop within its session.
    let length = plan.args.duration.max(plan.args.steady_session_timeout * 3 / 2);
    let killed = run_command(command, id, &addr);
    let (killed, after) = tokio::join!(killed, longest_gaps(&mut steady, &mut plain, length));
    killed?;
    let (after, plain_after) = after?;
    load.check()?;
    let described = client.admin().describe_group(&steady.group, false).await?;
    ensure!(
        described.coordinator_node_id != id,
        "node {id} is still the coordinator: the command has not killed it"
    );
    ensure!(steady.member.assignment() == owned, "the member's partitions have changed");
    steady.member.close().await?;
    let name = format!(
        "coordinator killed: longest pause of {} partitions with other leaders",
        steady.partitions.len()
    );
    let ms = |pause: Duration| vec![pause.as_secs_f64() * 1e3];
    let plain = "a plain subscription's longest pause meanwhile";
    Ok(vec![
        GroupBenchRow::new("longest pause before the kill", "ms", ms(before))
            .against(plain, ms(plain_before)),
        GroupBenchRow::new(name, "ms", ms(after)).against(plain, ms(plain_after)),
    ])
}

async fn steady_member(
    plan: &GroupBenchPlan,
    client: &Client,
    topic: &str,
) -> Result<SteadyMember> {
    for number in 0..GROUPS_TRIED {
        let group = plan.group("coordinator", number);
        let joining = plan.client()?.consumer_group(&group).topics([topic]);
        let joining = joining.start(StartPolicy::Latest);
        let mut member = [joining.session_timeout(plan.args.steady_session_timeout).join()];
        settle(&mut member, plan.args.partitions, false).await?;
        let [member] = member;
        let coordinator = client.admin().describe_group(&group, false).await?.coordinator_node_id;
        let metadata = client.admin().metadata(&[topic]).await?;
        let leaders: BTreeMap<u32, u64> = metadata
            .shards
            .iter()
            .filter_map(|shard| Some((shard.shard_id, shard.leader.as_ref()?.node_id)))
            .collect();
        let route = metadata.topics.first().context("the topic has no route")?;
        let partitions: Vec<u32> = (0..)
            .zip(&route.shard_ids)
            .filter(|(_, shard)| leaders.get(shard).is_some_and(|leader| *leader != coordinator))
            .map(|(partition, _)| partition)
            .collect();
        let node = metadata.nodes.into_iter().find(|node| node.node_id == coordinator);
        if let Some(node) = node.filter(|_| !partitions.is_empty()) {
            let coordinator_addr = node.endpoint;
            return Ok(SteadyMember { member, group, coordinator, coordinator_addr, partitions });
        }
        member.close().await?;
    }
    bail!(
        "the coordinator leads all partitions, so all of them stop with it; start three nodes \
         with --shards 3"
    )
}

/// Longest time without a record of one of some partitions.
struct PauseWatch {
    last: BTreeMap<u32, Instant>,
    longest: Duration,
}

impl PauseWatch {
    fn new(partitions: &[u32]) -> Self {
        let last = partitions.iter().map(|partition| (*partition, Instant::now())).collect();
        Self { last, longest: Duration::ZERO }
    }

    fn on_records(&mut self, partition: u32) {
        if let Some(last) = self.last.get_mut(&partition) {
            self.longest = self.longest.max(last.elapsed());
            *last = Instant::now();
        }
    }

    fn longest(&self) -> Duration {
        // A partition that has stopped has had no event.
        let open = self.last.values().map(Instant::elapsed).max().unwrap_or_default();
        self.longest.max(open)
    }
}

/// Reads for this long as a member and without a group. Returns the longest pause of each.
async fn longest_gaps(
    steady: &mut SteadyMember,
    plain: &mut Subscription,
    length: Duration,
) -> Result<(Duration, Duration)> {
    let partitions = steady.partitions.clone();
    tokio::try_join!(longest_gap(steady, length), plain_gap(plain, &partitions, length))
}

async fn plain_gap(
    plain: &mut Subscription,
    partitions: &[u32],
    length: Duration,
) -> Result<Duration> {
    let until = Instant::now() + length;
    let mut pauses = PauseWatch::new(partitions);
    while let Ok(event) = timeout_at(until, plain.next_encoded()).await {
        if let Event::Data(data) = event.context("the subscription has ended")?? {
            pauses.on_records(data.partition);
        }
    }
    Ok(pauses.longest())
}

async fn longest_gap(steady: &mut SteadyMember, length: Duration) -> Result<Duration> {
    let until = Instant::now() + length;
    let mut pauses = PauseWatch::new(&steady.partitions);
    while let Ok(event) = timeout_at(until, steady.member.next_encoded()).await {
        match event.context("the member has ended")?? {
            GroupEvent::Data(data) => pauses.on_records(data.partition),
            GroupEvent::CaughtUp { .. } => {}
            GroupEvent::Assigned(partitions)
            | GroupEvent::Revoked(partitions)
            | GroupEvent::Lost(partitions) => {
                bail!("the assignment of a steady member changed: {}", numbers(&partitions))
            }
        }
    }
    Ok(pauses.longest())
}

fn numbers(partitions: &[AssignedPartition]) -> String {
    let numbers = partitions.iter().map(|it| it.partition.to_string());
    numbers.collect::<Vec<_>>().join(", ")
}

/// Restarts a node with and without many groups, and measures until it serves them.
pub(super) async fn restart(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let command = plan.args.restart_command.as_deref().context("--restart-command is missing")?;
    let topic = plan.topic("restart");
    plan.create_topic(&topic).await?;
    let client = plan.client()?;
    memory::commit(plan, &client, &topic, "first", 1, 0..1).await?;
    let node = client.admin().metadata(&[""]).await?.nodes;
    let [node] = &node[..] else {
        bail!("a restart is measured on one node, the cluster has {}", node.len())
    };
    let (first, groups) = (plan.group("first", 0), plan.args.empty_groups);
    let last = plan.group("restart", groups - 1);
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..plan.args.runs {
        without.push(until_served(plan, command, node, &first).await? * 1e3);
    }
    memory::commit(plan, &client, &topic, "restart", groups, 0..1).await?;
    for _ in 0..plan.args.runs {
        with.push(until_served(plan, command, node, &last).await? * 1e3);
    }
    let found = client.admin().groups().await?;
    let prefix = plan.group_prefix("restart");
    let found = found.iter().filter(|group| group.group.starts_with(&prefix)).count();
    ensure!(found == groups, "{found} of {groups} groups are left after the restarts");
    let name = format!("restart until a group is served, {groups} empty groups");
    Ok(vec![GroupBenchRow::new(name, "ms", with).against("one group", without)])
}

/// Returns the seconds from the begin of the command until the group's offsets can be read.
async fn until_served(
    plan: &GroupBenchPlan,
    command: &str,
    node: &helix_proto::log::v1::Node,
    group: &str,
) -> Result<f64> {
    let earlier = uptime(plan).await?;
    let since = Instant::now();
    run_command(command, node.node_id, &node.endpoint).await?;
    loop {
        // A new client each time: none waits for an earlier attempt.
        let client = plan.client()?;
        if let Ok(Ok(_)) = timeout(ATTEMPT_MAX, client.admin().group_offsets(group, &[])).await {
            break;
        }
        ensure!(since.elapsed() < STEP_MAX, "the node does not serve the group {group}");
        sleep(ATTEMPT_PAUSE).await;
    }
    let seconds = since.elapsed();
    ensure!(uptime(plan).await? < earlier + seconds, "the command has not restarted the node");
    Ok(seconds.as_secs_f64())
}

async fn uptime(plan: &GroupBenchPlan) -> Result<Duration> {
    let status = plan.client()?.admin().node_status(None).await?;
    let uptime = status.uptime.context("the node does not report its uptime")?;
    helix_proto::time::duration(uptime).context("read the uptime")
}

/// Runs a command of the user and waits for its end.
async fn run_command(command: &str, node_id: u64, addr: &str) -> Result<()> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]);
    shell.env("HELIX_NODE_ID", node_id.to_string()).env("HELIX_NODE_ADDR", addr);
    // Not its standard output, which a node in the background would keep open.
    shell.stdin(Stdio::null()).stdout(Stdio::null());
    let status = timeout(STEP_MAX, shell.status()).await;
    let status = status.with_context(|| format!("{command:?} does not end"))?;
    let status = status.with_context(|| format!("run {command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}
