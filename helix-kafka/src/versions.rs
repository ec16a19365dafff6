//! The APIs that the gateway serves, with their versions.

use kafka_protocol::messages::ApiKey;

use crate::schema::{ADMIN, CONSUME, Field, GROUPS, SECURITY};

/// An API and the versions of it that the gateway serves.
#[derive(Debug, Clone, Copy)]
pub struct ServedApi {
    /// Key.
    pub key: ApiKey,
    /// First version.
    pub min: i16,
    /// Last version.
    pub max: i16,
    /// First version with compact lengths and tagged fields; `i16::MAX` if none has them.
    pub flexible_since: i16,
    /// First version that ApiVersions states, if it is lower than `min`.
    pub announced_min: i16,
    /// Schema of the request.
    pub schema: &'static [Field],
}

impl ServedApi {
    const fn new(
        key: ApiKey,
        (min, max): (i16, i16),
        flexible_since: i16,
        schema: &'static [Field],
    ) -> Self {
        Self { key, min, max, flexible_since, announced_min: min, schema }
    }

    const fn announced_from(mut self, version: i16) -> Self {
        self.announced_min = version;
        self
    }

    /// Returns true if the version is served.
    pub fn serves(&self, version: i16) -> bool {
        (self.min..=self.max).contains(&version)
    }

    /// Returns true if requests and responses of the version have compact lengths and tagged
    /// fields.
    pub fn is_flexible(&self, version: i16) -> bool {
        version >= self.flexible_since
    }
}

const NEVER: i16 = i16::MAX;

/// The served APIs, in the order of their keys. Versions with topic ids are left out.
pub const SERVED_APIS: &[ServedApi] = &[
    // Versions 0 to 2 are announced only: librdkafka needs version 0 in the list to compress.
    ServedApi::new(ApiKey::Produce, (3, 10), 9, CONSUME.produce).announced_from(0),
    ServedApi::new(ApiKey::Fetch, (4, 12), 12, CONSUME.fetch),
    ServedApi::new(ApiKey::ListOffsets, (1, 7), 6, CONSUME.list_offsets),
    ServedApi::new(ApiKey::Metadata, (0, 9), 9, CONSUME.metadata),
    ServedApi::new(ApiKey::OffsetCommit, (2, 8), 8, GROUPS.offset_commit),
    ServedApi::new(ApiKey::OffsetFetch, (1, 8), 6, GROUPS.offset_fetch),
    ServedApi::new(ApiKey::FindCoordinator, (0, 4), 3, GROUPS.find_coordinator),
    ServedApi::new(ApiKey::JoinGroup, (0, 9), 6, GROUPS.join),
    ServedApi::new(ApiKey::Heartbeat, (0, 4), 4, GROUPS.heartbeat),
    ServedApi::new(ApiKey::LeaveGroup, (0, 5), 4, GROUPS.leave),
    ServedApi::new(ApiKey::SyncGroup, (0, 5), 4, GROUPS.sync),
    ServedApi::new(ApiKey::DescribeGroups, (0, 5), 5, GROUPS.describe),
    ServedApi::new(ApiKey::ListGroups, (0, 4), 3, GROUPS.list),
    ServedApi::new(ApiKey::SaslHandshake, (0, 1), NEVER, SECURITY.handshake),
    ServedApi::new(ApiKey::ApiVersions, (0, 4), 3, CONSUME.api_versions),
    ServedApi::new(ApiKey::CreateTopics, (2, 7), 5, ADMIN.create_topics),
    ServedApi::new(ApiKey::DeleteTopics, (1, 5), 4, ADMIN.delete_topics),
    ServedApi::new(ApiKey::DeleteRecords, (0, 2), 2, ADMIN.delete_records),
    ServedApi::new(ApiKey::InitProducerId, (0, 4), 2, CONSUME.init_producer_id),
    ServedApi::new(ApiKey::OffsetForLeaderEpoch, (2, 4), 4, CONSUME.leader_epoch),
    ServedApi::new(ApiKey::DescribeAcls, (1, 3), 2, SECURITY.describe_acls),
    ServedApi::new(ApiKey::DescribeConfigs, (1, 4), 4, ADMIN.describe_configs),
    ServedApi::new(ApiKey::SaslAuthenticate, (0, 2), 2, SECURITY.authenticate),
    ServedApi::new(ApiKey::CreatePartitions, (0, 3), 2, ADMIN.create_partitions),
    ServedApi::new(ApiKey::DeleteGroups, (0, 2), 2, GROUPS.delete),
    ServedApi::new(ApiKey::IncrementalAlterConfigs, (0, 1), 1, ADMIN.alter_configs),
    ServedApi::new(ApiKey::OffsetDelete, (0, 0), NEVER, GROUPS.offset_delete),
    ServedApi::new(ApiKey::DescribeCluster, (0, 1), 0, ADMIN.describe_cluster),
];

/// Returns the served API with this key.
pub fn served_api(key: i16) -> Option<&'static ServedApi> {
    SERVED_APIS.iter().find(|api| api.key as i16 == key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn served_versions_are_those_of_the_messages() {
        for api in SERVED_APIS {
            let known = api.key.valid_versions();
            assert!(known.min <= api.min && api.max <= known.max, "{api:?}: {known}");
            for version in api.min..=api.max {
                let header = api.key.request_header_version(version);
                assert_eq!(header >= 2, api.is_flexible(version), "{:?} {version}", api.key);
            }
        }
        assert!(SERVED_APIS.is_sorted_by_key(|api| api.key as i16));
    }
}
