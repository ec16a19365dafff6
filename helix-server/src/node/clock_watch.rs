//! Compares the clocks of the members, so that no single one decides on append times and retention.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, MissedTickBehavior};

use super::Node;
use crate::clock::{AgreedClock, CLOCK_CONFIRMATION, ClockReading};
use crate::limits;
use crate::peer::Hub;

/// Longest response time of a usable reading: half of it is uncertain.
const RESPONSE_TIME_MAX: Duration = Duration::from_secs(2);

/// Runs until the node closes.
pub(super) async fn run(node: Weak<Node>) {
    let mut tick = tokio::time::interval(limits::CLOCK_POLL_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut log = ClockLog::default();
    loop {
        tick.tick().await;
        let Some((own, members, hub, clock)) = node.upgrade().and_then(|node| {
            let parts = (node.settings.node_id, node.cluster.nodes(), &node.hub, &node.clock);
            let (own, members, hub, clock) = parts;
            (!node.draining.is_cancelled()).then(|| (own, members, hub.clone(), clock.clone()))
        }) else {
            return;
        };
        // Not formed yet.
        if members.is_empty() {
            tick.reset_after(limits::CLOCK_FIRST_POLL_INTERVAL);
            continue;
        }
        let others = members.iter().filter(|member| **member != own);
        let readings = join_all(others.map(|member| read_clock(&hub, *member))).await;
        let readings: Vec<ClockReading> = readings.into_iter().flatten().collect();
        clock.observe(own, members.len(), &readings);
        log.report(&clock);
        if members.len() > 1 && clock.offsets().is_empty() {
            tick.reset_after(limits::CLOCK_FIRST_POLL_INTERVAL);
        }
    }
}

/// Reads a member's clock, at the middle of the call.
async fn read_clock(hub: &Hub, node_id: u64) -> Option<ClockReading> {
    let begun = Instant::now();
    let hello = hub.hello(node_id).await.ok()?;
    let at = Instant::now();
    let response_time = at - begun;
    if hello.wall_time_us == 0 || response_time > RESPONSE_TIME_MAX {
        return None;
    }
    let half_us = u64::try_from(response_time.as_micros() / 2).unwrap_or(0);
    Some(ClockReading { node_id, wall_us: hello.wall_time_us.saturating_add(half_us), at })
}

/// Logs changes of the findings.
#[derive(Default)]
struct ClockLog {
    off: BTreeSet<u64>,
    has_jumped: bool,
}

impl ClockLog {
    fn report(&mut self, clock: &Arc<AgreedClock>) {
        for offset in clock.offsets() {
            let (node, offset_s) = (offset.node_id, offset.offset_us / 1_000_000);
            if offset.is_off() {
                if self.off.insert(node) {
                    tracing::warn!(
                        node,
                        offset_s,
                        "clock differs from the time that a majority has reached; correct it"
                    );
                }
            } else if self.off.remove(&node) {
                tracing::info!(node, offset_s, "clock is right again");
            }
        }
        let has_jumped = clock.has_jumped();
        if has_jumped && !self.has_jumped {
            let steady_s = CLOCK_CONFIRMATION.as_secs();
            tracing::warn!(
                steady_s,
                "clock jumped; holding retention by time until the clock has been steady"
            );
        } else if self.has_jumped && !has_jumped {
            tracing::info!("clock is confirmed; resuming retention by time");
        }
        self.has_jumped = has_jumped;
    }
}
