//! ApiVersions.

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::ApiVersionsResponse;
use kafka_protocol::messages::api_versions_response::ApiVersion;

use crate::versions::{SERVED_APIS, ServedApi};

fn announced(api: &ServedApi) -> ApiVersion {
    ApiVersion::default()
        .with_api_key(api.key as i16)
        .with_min_version(api.announced_min)
        .with_max_version(api.max)
}

/// Returns all served APIs.
pub(crate) fn api_versions() -> ApiVersionsResponse {
    ApiVersionsResponse::default().with_api_keys(SERVED_APIS.iter().map(announced).collect())
}

/// Returns the answer to an unknown version: only the versions of ApiVersions, so that the client
/// asks again with one of them.
pub(crate) fn unknown_version() -> ApiVersionsResponse {
    let own = SERVED_APIS.iter().filter(|api| api.key as i16 == 18);
    ApiVersionsResponse::default()
        .with_error_code(ResponseError::UnsupportedVersion.code())
        .with_api_keys(own.map(announced).collect())
}
