//! Error codes in responses, for the metrics.

use kafka_protocol::messages::*;

/// A response whose error codes can be listed.
pub(crate) trait ResponseCodes {
    /// Calls `visit` with each code; 0 is no error.
    fn visit_codes(&self, visit: &mut dyn FnMut(i16));
}

/// Responses with one code, with one in each row, and with one in each row of a row.
macro_rules! codes {
    (
        $($response:ty)*;
        $($rows:ty => $list:ident)*;
        $($tables:ty => $outer:ident $inner:ident)*
    ) => {
        $(impl ResponseCodes for $response {
            fn visit_codes(&self, visit: &mut dyn FnMut(i16)) {
                visit(self.error_code);
            }
        })*
        $(impl ResponseCodes for $rows {
            fn visit_codes(&self, visit: &mut dyn FnMut(i16)) {
                self.$list.iter().for_each(|row| visit(row.error_code));
            }
        })*
        $(impl ResponseCodes for $tables {
            fn visit_codes(&self, visit: &mut dyn FnMut(i16)) {
                let rows = self.$outer.iter().flat_map(|row| &row.$inner);
                rows.for_each(|row| visit(row.error_code));
            }
        })*
    };
}

codes! {
    ApiVersionsResponse
    InitProducerIdResponse
    JoinGroupResponse
    SyncGroupResponse
    HeartbeatResponse
    ListGroupsResponse
    DescribeClusterResponse
    DescribeAclsResponse
    SaslHandshakeResponse
    SaslAuthenticateResponse;
    DescribeGroupsResponse => groups
    DeleteGroupsResponse => results
    CreateTopicsResponse => topics
    DeleteTopicsResponse => responses
    CreatePartitionsResponse => results
    DescribeConfigsResponse => results
    IncrementalAlterConfigsResponse => responses;
    ProduceResponse => responses partition_responses
    ListOffsetsResponse => topics partitions
    OffsetForLeaderEpochResponse => topics partitions
    OffsetCommitResponse => topics partitions
    DeleteRecordsResponse => topics partitions
}

impl ResponseCodes for MetadataResponse {
    fn visit_codes(&self, visit: &mut dyn FnMut(i16)) {
        self.topics.iter().for_each(|topic| visit(topic.error_code));
        let partitions = self.topics.iter().flat_map(|topic| &topic.partitions);
        partitions.for_each(|partition| visit(partition.error_code));
    }
}

impl ResponseCodes for FindCoordinatorResponse {
    fn visit_codes(&self, visit: &mut dyn FnMut(i16)) {
        visit(self.error_code);
        self.coordinators.iter().for_each(|row| visit(row.error_code));
    }
}

impl ResponseCodes for LeaveGroupResponse {
    fn visit_codes(&self, visit: &mut dyn FnMut(i16)) {
        visit(self.error_code);
        self.members.iter().for_each(|row| visit(row.error_code));
    }
}

impl ResponseCodes for OffsetFetchResponse {
    fn visit_codes(&self, visit: &mut dyn FnMut(i16)) {
        visit(self.error_code);
        self.groups.iter().for_each(|row| visit(row.error_code));
    }
}

impl ResponseCodes for OffsetDeleteResponse {
    fn visit_codes(&self, visit: &mut dyn FnMut(i16)) {
        visit(self.error_code);
        let partitions = self.topics.iter().flat_map(|topic| &topic.partitions);
        partitions.for_each(|partition| visit(partition.error_code));
    }
}
