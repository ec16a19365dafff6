//! Groups whose members a gateway of another protocol has: soft state of a shard's leader, which
//! ends with the time that each report states.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::limits::GATEWAY_REPORTS_BYTES_MAX;
use crate::log::{GroupRefusal, PartitionKey};
use crate::sync;

/// Memory of a report, a member and a partition beyond their texts.
const REPORT_BYTES: usize = 256;
const MEMBER_BYTES: usize = 160;
const PARTITION_BYTES: usize = 16;

/// Progress of a group, as its gateway reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GatewayGroupState {
    /// Members join.
    Assigning,
    /// Members learn their partitions.
    Reconciling,
    /// Every member has its partitions.
    Stable,
}

/// The last report of a gateway about a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayGroup {
    /// Address of the gateway.
    pub gateway: String,
    pub state: GatewayGroupState,
    /// Sorted by id, each id once.
    pub members: Vec<ReportedMember>,
    pub reported_at: Instant,
    pub valid_for: Duration,
}

/// A member of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedMember {
    pub id: Arc<str>,
    pub static_name: String,
    pub client_name: String,
    /// Sorted.
    pub partitions: Vec<PartitionKey>,
}

impl GatewayGroup {
    /// Returns the member with this id.
    pub fn member(&self, id: &str) -> Option<&ReportedMember> {
        let place = self.members.binary_search_by(|member| (*member.id).cmp(id)).ok()?;
        self.members.get(place)
    }

    fn is_valid(&self) -> bool {
        self.reported_at.elapsed() < self.valid_for
    }

    fn bytes(&self) -> usize {
        let member = |member: &ReportedMember| {
            let texts = member.id.len() + member.static_name.len() + member.client_name.len();
            MEMBER_BYTES + texts + member.partitions.len() * PARTITION_BYTES
        };
        REPORT_BYTES + self.gateway.len() + self.members.iter().map(member).sum::<usize>()
    }
}

/// Reports of gateways about the groups of a shard.
#[derive(Debug, Default)]
pub struct GatewayGroups {
    reports: Mutex<Reports>,
}

#[derive(Debug, Default)]
struct Reports {
    by_group: BTreeMap<Arc<str>, Arc<GatewayGroup>>,
    bytes: usize,
}

impl Reports {
    fn remove(&mut self, group: &str) {
        if let Some((name, removed)) = self.by_group.remove_entry(group) {
            self.bytes -= removed.bytes() + name.len();
        }
    }
}

impl GatewayGroups {
    /// Keeps a report in place of the last one.
    ///
    /// # Errors
    /// [`GroupRefusal::LimitReached`] if the reports of the shard would take too much memory.
    pub fn put(&self, group: &str, report: GatewayGroup) -> Result<(), GroupRefusal> {
        let mut reports = sync::lock(&self.reports);
        reports.remove(group);
        let bytes = report.bytes() + group.len();
        if reports.bytes + bytes > GATEWAY_REPORTS_BYTES_MAX {
            // Only now, so that a report costs no scan.
            let expired = reports.by_group.iter().filter(|(_, report)| !report.is_valid());
            let expired: Vec<_> = expired.map(|(name, _)| name.clone()).collect();
            expired.iter().for_each(|name| reports.remove(name));
        }
        if reports.bytes + bytes > GATEWAY_REPORTS_BYTES_MAX {
            let (what, limit) = ("bytes of gateways' reports", GATEWAY_REPORTS_BYTES_MAX);
            return Err(GroupRefusal::LimitReached { what, limit });
        }
        reports.bytes += bytes;
        reports.by_group.insert(group.into(), Arc::new(report));
        Ok(())
    }

    /// Ends the report of a gateway. Another gateway's report stays.
    pub fn end(&self, group: &str, gateway: &str) {
        let mut reports = sync::lock(&self.reports);
        if reports.by_group.get(group).is_some_and(|report| report.gateway == gateway) {
            reports.remove(group);
        }
    }

    /// Returns the valid report about a group.
    pub fn get(&self, group: &str) -> Option<Arc<GatewayGroup>> {
        let report = sync::lock(&self.reports).by_group.get(group).cloned();
        report.filter(|report| report.is_valid())
    }

    /// Returns the first groups after `name` with valid reports that `is_wanted`, in order.
    pub fn names_after(
        &self,
        name: &str,
        count_max: usize,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Vec<Arc<str>> {
        use std::ops::Bound::{Excluded, Unbounded};
        let reports = sync::lock(&self.reports);
        let later = reports.by_group.range::<str, _>((Excluded(name), Unbounded));
        let valid = later.filter(|(name, report)| report.is_valid() && is_wanted(name));
        valid.map(|(name, _)| name.clone()).take(count_max).collect()
    }

    /// Forgets all reports: this replica does not lead.
    pub fn clear(&self) {
        *sync::lock(&self.reports) = Reports::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(gateway: &str, partitions: u32) -> GatewayGroup {
        let partitions = (0..partitions).map(|number| PartitionKey { topic_id: 1, number });
        GatewayGroup {
            gateway: gateway.to_owned(),
            state: GatewayGroupState::Stable,
            members: vec![ReportedMember {
                id: "m".into(),
                static_name: String::new(),
                client_name: String::new(),
                partitions: partitions.collect(),
            }],
            reported_at: Instant::now(),
            valid_for: Duration::from_secs(10),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn report_counts_for_its_time_and_until_its_gateway_ends_it() {
        let groups = GatewayGroups::default();
        groups.put("g", report("a", 1)).unwrap();
        groups.put("h", report("a", 1)).unwrap();
        assert_eq!(groups.names_after("g", 9, |_| true), ["h".into()]);
        tokio::time::advance(Duration::from_secs(9)).await;
        groups.put("g", report("b", 1)).unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(groups.get("h").is_none());
        groups.end("g", "a");
        assert_eq!(groups.get("g").unwrap().gateway, "b");
        assert_eq!(groups.names_after("", 9, |_| true), ["g".into()]);
        groups.end("g", "b");
        assert!(groups.get("g").is_none());
        groups.put("g", report("b", 1)).unwrap();
        groups.clear();
        assert!(groups.get("g").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn memory_of_reports_is_bounded() {
        let groups = GatewayGroups::default();
        let count =
            (1_u32..).find(|number| groups.put(&number.to_string(), report("a", 10_000)).is_err());
        assert!((90..=105).contains(&count.unwrap()), "{count:?}");
        // A smaller report of a known group takes the place of its last one.
        groups.put("1", report("a", 10)).unwrap();
        assert_eq!(groups.get("1").unwrap().members[0].partitions.len(), 10);
        tokio::time::advance(Duration::from_secs(10)).await;
        groups.put("x", report("a", 10_000)).unwrap();
        assert_eq!(groups.names_after("", 200, |_| true), ["x".into()]);
    }
}
