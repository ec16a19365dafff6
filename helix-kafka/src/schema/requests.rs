//! Schemas of the requests that the gateway serves, as Kafka's message definitions have them.

use super::{Field, Kind};

const BOOL: Kind = Kind::Fixed(1);
const INT8: Kind = Kind::Fixed(1);
const INT16: Kind = Kind::Fixed(2);
const INT32: Kind = Kind::Fixed(4);
const INT64: Kind = Kind::Fixed(8);
const UUID: Kind = Kind::Fixed(16);
const TEXT: Kind = Kind::Text;
const BYTES: Kind = Kind::Bytes;

const fn all(kind: Kind) -> Field {
    Field::always(kind)
}

const fn since(version: i16, kind: Kind) -> Field {
    Field::since(version, kind)
}

const fn between(first: i16, last: i16, kind: Kind) -> Field {
    Field::between(first, last, kind)
}

const fn list(kind: &'static Kind) -> Kind {
    Kind::List(kind)
}

/// Records and offsets.
#[derive(Debug)]
pub struct ConsumeSchemas {
    /// Produce.
    pub produce: &'static [Field],
    /// Fetch.
    pub fetch: &'static [Field],
    /// ListOffsets.
    pub list_offsets: &'static [Field],
    /// Metadata.
    pub metadata: &'static [Field],
    /// OffsetForLeaderEpoch.
    pub leader_epoch: &'static [Field],
    /// InitProducerId.
    pub init_producer_id: &'static [Field],
    /// ApiVersions.
    pub api_versions: &'static [Field],
}

/// Schemas of requests for records and offsets.
pub const CONSUME: ConsumeSchemas = ConsumeSchemas {
    produce: &[
        all(TEXT),
        all(INT16),
        all(INT32),
        all(list(&Kind::Struct(&[all(TEXT), all(list(&Kind::Struct(&[all(INT32), all(BYTES)])))]))),
    ],
    fetch: &[
        all(INT32),
        all(INT32),
        all(INT32),
        all(INT32),
        all(INT8),
        since(7, INT32),
        since(7, INT32),
        all(list(&Kind::Struct(&[
            all(TEXT),
            all(list(&Kind::Struct(&[
                all(INT32),
                since(9, INT32),
                all(INT64),
                since(12, INT32),
                since(5, INT64),
                all(INT32),
            ]))),
        ]))),
        since(7, list(&Kind::Struct(&[all(TEXT), all(list(&INT32))]))),
        since(11, TEXT),
    ],
    list_offsets: &[
        all(INT32),
        since(2, INT8),
        all(list(&Kind::Struct(&[
            all(TEXT),
            all(list(&Kind::Struct(&[all(INT32), since(4, INT32), all(INT64)]))),
        ]))),
    ],
    metadata: &[
        all(list(&Kind::Struct(&[since(10, UUID), all(TEXT)]))),
        since(4, BOOL),
        between(8, 10, BOOL),
        since(8, BOOL),
    ],
    leader_epoch: &[
        since(3, INT32),
        all(list(&Kind::Struct(&[
            all(TEXT),
            all(list(&Kind::Struct(&[all(INT32), all(INT32), all(INT32)]))),
        ]))),
    ],
    init_producer_id: &[all(TEXT), all(INT32), since(3, INT64), since(3, INT16)],
    api_versions: &[since(3, TEXT), since(3, TEXT)],
};

/// Consumer groups.
#[derive(Debug)]
pub struct GroupSchemas {
    /// FindCoordinator.
    pub find_coordinator: &'static [Field],
    /// JoinGroup.
    pub join: &'static [Field],
    /// SyncGroup.
    pub sync: &'static [Field],
    /// Heartbeat.
    pub heartbeat: &'static [Field],
    /// LeaveGroup.
    pub leave: &'static [Field],
    /// OffsetCommit.
    pub offset_commit: &'static [Field],
    /// OffsetFetch.
    pub offset_fetch: &'static [Field],
    /// OffsetDelete.
    pub offset_delete: &'static [Field],
    /// ListGroups.
    pub list: &'static [Field],
    /// DescribeGroups.
    pub describe: &'static [Field],
    /// DeleteGroups.
    pub delete: &'static [Field],
}

/// Schemas of requests about consumer groups.
pub const GROUPS: GroupSchemas = GroupSchemas {
    find_coordinator: &[between(0, 3, TEXT), since(1, INT8), since(4, list(&TEXT))],
    join: &[
        all(TEXT),
        all(INT32),
        since(1, INT32),
        all(TEXT),
        since(5, TEXT),
        all(TEXT),
        all(list(&Kind::Struct(&[all(TEXT), all(BYTES)]))),
        since(8, TEXT),
    ],
    sync: &[
        all(TEXT),
        all(INT32),
        all(TEXT),
        since(3, TEXT),
        since(5, TEXT),
        since(5, TEXT),
        all(list(&Kind::Struct(&[all(TEXT), all(BYTES)]))),
    ],
    heartbeat: &[all(TEXT), all(INT32), all(TEXT), since(3, TEXT)],
    leave: &[
        all(TEXT),
        between(0, 2, TEXT),
        since(3, list(&Kind::Struct(&[all(TEXT), all(TEXT), since(5, TEXT)]))),
    ],
    offset_commit: &[
        all(TEXT),
        all(INT32),
        all(TEXT),
        since(7, TEXT),
        between(2, 4, INT64),
        all(list(&Kind::Struct(&[
            all(TEXT),
            all(list(&Kind::Struct(&[all(INT32), all(INT64), since(6, INT32), all(TEXT)]))),
        ]))),
    ],
    offset_fetch: &[
        between(0, 7, TEXT),
        between(0, 7, list(&Kind::Struct(&[all(TEXT), all(list(&INT32))]))),
        since(
            8,
            list(&Kind::Struct(&[
                all(TEXT),
                all(list(&Kind::Struct(&[all(TEXT), all(list(&INT32))]))),
            ])),
        ),
        since(7, BOOL),
    ],
    offset_delete: &[
        all(TEXT),
        all(list(&Kind::Struct(&[all(TEXT), all(list(&Kind::Struct(&[all(INT32)])))]))),
    ],
    list: &[since(4, list(&TEXT)), since(5, list(&TEXT))],
    describe: &[all(list(&TEXT)), since(3, BOOL)],
    delete: &[all(list(&TEXT))],
};

/// Topics, settings and the cluster.
#[derive(Debug)]
pub struct AdminSchemas {
    /// CreateTopics.
    pub create_topics: &'static [Field],
    /// DeleteTopics.
    pub delete_topics: &'static [Field],
    /// CreatePartitions.
    pub create_partitions: &'static [Field],
    /// DescribeConfigs.
    pub describe_configs: &'static [Field],
    /// IncrementalAlterConfigs.
    pub alter_configs: &'static [Field],
    /// DescribeCluster.
    pub describe_cluster: &'static [Field],
    /// DeleteRecords.
    pub delete_records: &'static [Field],
}

/// Schemas of requests about topics, settings and the cluster.
pub const ADMIN: AdminSchemas = AdminSchemas {
    create_topics: &[
        all(list(&Kind::Struct(&[
            all(TEXT),
            all(INT32),
            all(INT16),
            all(list(&Kind::Struct(&[all(INT32), all(list(&INT32))]))),
            all(list(&Kind::Struct(&[all(TEXT), all(TEXT)]))),
        ]))),
        all(INT32),
        all(BOOL),
    ],
    delete_topics: &[
        since(6, list(&Kind::Struct(&[all(TEXT), all(UUID)]))),
        between(0, 5, list(&TEXT)),
        all(INT32),
    ],
    create_partitions: &[
        all(list(&Kind::Struct(&[
            all(TEXT),
            all(INT32),
            all(list(&Kind::Struct(&[all(list(&INT32))]))),
        ]))),
        all(INT32),
        all(BOOL),
    ],
    describe_configs: &[
        all(list(&Kind::Struct(&[all(INT8), all(TEXT), all(list(&TEXT))]))),
        all(BOOL),
        since(3, BOOL),
    ],
    alter_configs: &[
        all(list(&Kind::Struct(&[
            all(INT8),
            all(TEXT),
            all(list(&Kind::Struct(&[all(TEXT), all(INT8), all(TEXT)]))),
        ]))),
        all(BOOL),
    ],
    describe_cluster: &[all(BOOL), since(1, INT8), since(2, BOOL)],
    delete_records: &[
        all(list(&Kind::Struct(&[all(TEXT), all(list(&Kind::Struct(&[all(INT32), all(INT64)])))]))),
        all(INT32),
    ],
};

/// Authentication and access rules.
#[derive(Debug)]
pub struct SecuritySchemas {
    /// SaslHandshake.
    pub handshake: &'static [Field],
    /// SaslAuthenticate.
    pub authenticate: &'static [Field],
    /// DescribeAcls.
    pub describe_acls: &'static [Field],
}

/// Schemas of requests about authentication and access rules.
pub const SECURITY: SecuritySchemas = SecuritySchemas {
    handshake: &[all(TEXT)],
    authenticate: &[all(BYTES)],
    describe_acls: &[all(INT8), all(TEXT), all(INT8), all(TEXT), all(TEXT), all(INT8), all(INT8)],
};
