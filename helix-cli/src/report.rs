//! Renders errors in three parts: the failed action with its reason, the cause, and what to try.
//! `exit` maps errors to exit codes.

use std::fmt::Write;

use helix_client::{Error as ClientError, Origin};
use helix_proto::error::{self as wire, reason_name};
use helix_proto::log::v1::ErrorReason;
use helix_proto::shown;
use schemars::JsonSchema;
use serde::Serialize;
use tonic::Code;

use crate::exit::{self, CliError, Exit};
use crate::reasons::{self, ReasonText};
use crate::style::Style;

/// Facts about the command that error texts refer to.
#[derive(Debug, Clone, Default)]
pub(crate) struct ErrorContext {
    /// Addresses of the cluster.
    pub(crate) addr: String,
    /// Setting that the addresses come from; empty if unknown.
    pub(crate) addr_source: String,
    /// CA file with which the command connects; empty without TLS.
    pub(crate) tls_ca: String,
    /// Topic that the command is about.
    pub(crate) topic: Option<String>,
    /// Consumer group that the command is about.
    pub(crate) group: Option<String>,
    /// True for `helix cluster health`, which is then not suggested.
    pub(crate) is_health: bool,
    /// Nodes that must return before the command can succeed, if that was found out.
    pub(crate) needed_nodes: Option<String>,
    /// Hint for an unknown outcome, for commands that a repetition would double.
    pub(crate) retry_hint: Option<String>,
    /// True if errors are JSON, as results are.
    pub(crate) is_json: bool,
}

impl ErrorContext {
    /// Returns the source of the addresses in brackets.
    fn source(&self) -> String {
        match self.addr_source.as_str() {
            "" => String::new(),
            source => format!(" ({source})"),
        }
    }
}

/// Returns the error text for standard error, with a final newline.
pub(crate) fn render(error: &anyhow::Error, context: &ErrorContext, style: Style) -> String {
    let parts = ErrorParts::new(error, context);
    // It has messages of services and proxies.
    let what = shown::one_line(&parts.what);
    let mut text = format!("{} {what}\n", style.error("error:"));
    for (label, part) in [("why", parts.why), ("try", parts.hint)] {
        if !part.is_empty() {
            let part = shown::lines(&part).replace('\n', "\n       ");
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {} {part}", style.label(&format!("{label}:")));
        }
    }
    text
}

/// Returns the error as one line of JSON, with a final newline.
pub(crate) fn render_json(error: &anyhow::Error, context: &ErrorContext) -> String {
    let ErrorParts { what, why, hint } = ErrorParts::new(error, context);
    let cause = error.chain().find_map(|cause| cause.downcast_ref::<ClientError>());
    let report = ErrorReport {
        error: ErrorBody {
            reason: cause
                .and_then(|error| reason_of(error, context))
                .map(|it| reason_name(it).to_owned()),
            code: match cause {
                Some(error) => match reason_of(error, context) {
                    Some(reason) => grpc_code_name(wire::code(reason)),
                    None => grpc_code_name(error.code),
                },
                None => code_of(exit::of(error)).to_owned(),
            },
            may_have_applied: cause.is_some_and(|error| error.may_have_applied),
            message: if why.is_empty() { what } else { format!("{what}: {why}") },
            hint,
        },
    };
    // A struct of strings cannot fail to serialize.
    serde_json::to_string(&report).unwrap_or_default() + "\n"
}

/// An error, as every command prints it to standard error with `-o json`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ErrorReport {
    error: ErrorBody,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ErrorBody {
    /// Reason of the service. Null if the service gave none
    reason: Option<String>,
    /// gRPC code, such as NOT_FOUND
    code: String,
    /// True if the request may have been applied
    may_have_applied: bool,
    /// Failure with its cause
    message: String,
    /// Commands and actions to try, one per line
    hint: String,
}

/// Returns the gRPC code that fits an error of the program itself.
fn code_of(exit: Exit) -> &'static str {
    match exit {
        Exit::Done => "OK",
        Exit::Error | Exit::Partly => "UNKNOWN",
        Exit::Usage => "INVALID_ARGUMENT",
        Exit::NotFound => "NOT_FOUND",
        Exit::Precondition => "FAILED_PRECONDITION",
        Exit::Unavailable => "UNAVAILABLE",
        Exit::VerificationFailed => "DATA_LOSS",
        Exit::Interrupted => "CANCELLED",
    }
}

struct ErrorParts {
    what: String,
    why: String,
    hint: String,
}

impl ErrorParts {
    fn new(error: &anyhow::Error, context: &ErrorContext) -> Self {
        let mut contexts: Vec<String> = Vec::new();
        for cause in error.chain() {
            if let Some(failure) = cause.downcast_ref::<CliError>() {
                contexts.push(failure.what.clone());
                let (why, hint) = (failure.why.clone(), failure.hint.clone());
                return Self { what: contexts.join(": "), why, hint };
            }
            if let Some(error) = cause.downcast_ref::<ClientError>() {
                return Self::of_client_error(contexts, error, context);
            }
            contexts.push(cause.to_string());
        }
        Self { what: contexts.join(": "), why: String::new(), hint: String::new() }
    }

    fn of_client_error(
        mut contexts: Vec<String>,
        error: &ClientError,
        context: &ErrorContext,
    ) -> Self {
        let reason = reason_of(error, context);
        let (mut why, mut hint) = match reason {
            Some(reason) => of_reason(reason, error, context),
            None => of_transport(error, context),
        };
        let code = match reason {
            Some(reason) => reason_name(reason).to_owned(),
            None => grpc_code_name(error.code),
        };
        let message = match error.message.as_str() {
            "" => "the request failed",
            message => message,
        };
        contexts.push(format!("{message} ({code})"));
        if let Some(needed) = &context.needed_nodes {
            needed.clone_into(&mut why);
        }
        if error.may_have_applied {
            why += "\nthe write may or may not have been applied";
            if let Some(retry_hint) = &context.retry_hint {
                hint = format!("{retry_hint}\nhelix cluster health");
            }
        }
        Self { what: contexts.join(": "), why: why.trim_start().to_owned(), hint }
    }
}

/// Returns the reason of an error. A call that timed out because a shard has no majority has the
/// reason that the service would give.
fn reason_of(error: &ClientError, context: &ErrorContext) -> Option<ErrorReason> {
    let is_silence = matches!(error.code, Code::Unavailable | Code::DeadlineExceeded);
    let lacks_majority = context.needed_nodes.is_some() && is_silence;
    error.reason.or(lacks_majority.then_some(ErrorReason::NoLeader))
}

/// Returns cause and hint of an error of the service.
fn of_reason(reason: ErrorReason, error: &ClientError, context: &ErrorContext) -> (String, String) {
    use ErrorReason as R;
    let ReasonText { why, hint, .. } = reasons::of(reason);
    // Details of the error make some causes more specific.
    let why = match reason {
        R::TopicNotFound => format!("the cluster at {} has no topic of this name", context.addr),
        R::OffsetOutOfRange => out_of_range(error, why),
        R::NotLeader => not_leader(error),
        R::Fenced => fenced(error, why),
        R::BatchTooLarge | R::RecordTooLarge => limit(error, why),
        R::GroupNotEmpty => members(error, why),
        R::PermissionDenied => denied(error, context, why),
        _ => why.to_owned(),
    };
    let of_group = context.group.as_ref().and_then(|_| reasons::group_hint(reason));
    let hint = of_group.unwrap_or(hint);
    let topic = context.topic.as_deref().unwrap_or("TOPIC");
    let group = context.group.as_deref().unwrap_or("GROUP");
    let parts: Vec<_> = hint.split("GROUP").map(|part| part.replace("TOPIC", topic)).collect();
    let hint = parts.join(group);
    (why, format!("{hint}\nhelix explain {}", reason_name(reason)))
}

fn not_leader(error: &ClientError) -> String {
    if error.leader.is_none() && error.message.contains("was removed from this cluster") {
        return "the contacted node is not a member of the cluster; use the address of another node"
            .to_owned();
    }
    let to = match &error.leader {
        Some(leader) if leader.node_id != 0 => {
            format!("node {} at {} is the leader", leader.node_id, leader.endpoint)
        }
        _ => "it does not know the leader".to_owned(),
    };
    format!("leadership moved while the command ran; the contacted node reports: {to}")
}

fn out_of_range(error: &ClientError, why: &str) -> String {
    match &error.watermarks {
        Some(marks) => {
            format!("offsets {}..{} can be read", marks.log_start_offset, marks.high_watermark)
        }
        None => why.to_owned(),
    }
}

fn fenced(error: &ClientError, why: &str) -> String {
    match error.fencing_token.as_deref() {
        Some("") => "the partition has no fencing token".to_owned(),
        Some(token) => format!("the current fencing token is {token:?}"),
        None => why.to_owned(),
    }
}

/// Names the topic of a command whose caller may use no topic at all.
fn denied(error: &ClientError, context: &ErrorContext, why: &str) -> String {
    match &context.topic {
        Some(topic) if error.message.contains(" any topic") => {
            format!("no rule of the principal allows it on topic {topic}, nor on another one")
        }
        _ => why.to_owned(),
    }
}

fn members(error: &ClientError, why: &str) -> String {
    match error.member_ids.as_slice() {
        [] => why.to_owned(),
        ids => {
            format!("it has these members, of which at most ten are listed:\n{}", ids.join("\n"))
        }
    }
}

fn limit(error: &ClientError, why: &str) -> String {
    match error.limit {
        Some(limit) if error.origin == Origin::Client => {
            format!("the client sends at most {limit} bytes of records in a message")
        }
        Some(limit) => format!("the limit of the topic is {limit} bytes"),
        None => why.to_owned(),
    }
}

/// Returns cause and hint of an error that a client or proxy created.
fn of_transport(error: &ClientError, context: &ErrorContext) -> (String, String) {
    let addr = &context.addr;
    match (error.origin, error.code) {
        _ if error.is_tls_failure => {
            let ca = match context.tls_ca.as_str() {
                "" => "without a CA, so without TLS".to_owned(),
                ca => format!("with the CA {ca}"),
            };
            let why = format!("no TLS connection to a node at {addr}{}, {ca}", context.source());
            let hint = "--tls-ca FILE   CA of the nodes, or HELIX_TLS_CA\n\
                        --tls-cert FILE --tls-key FILE   certificate of this client\n\
                        the node's log has the reason of the other side";
            (why, hint.to_owned())
        }
        (Origin::Service, _) => {
            let ReasonText { why, hint, .. } = reasons::of(ErrorReason::Unspecified);
            (why.to_owned(), hint.to_owned())
        }
        // Only a lagging replica gives this error; its message names it.
        (Origin::Client, Code::Unavailable) => {
            let why = "only a majority of the replicas has every acked record at once";
            let hint = "helix cluster shards   shows the lag of each replica\n\
                        run the command again, or without --any-replica";
            (why.to_owned(), hint.to_owned())
        }
        (_, Code::Unavailable | Code::DeadlineExceeded) => {
            let ReasonText { hint, .. } = reasons::of_no_response();
            let hint = match context.is_health {
                // The command has just asked every node.
                true => hint.split_once('\n').map_or(hint, |(_, rest)| rest),
                false => hint,
            };
            let why = "no Helix node answered in time at";
            let why =
                format!("{why} {addr}{} or at the addresses that nodes reported", context.source());
            (why, hint.to_owned())
        }
        (_, Code::Unimplemented | Code::Internal | Code::Unknown) => {
            let ReasonText { hint, .. } = reasons::of_unknown_server();
            let why = "may be another service, the peer port of a node instead of its client port, \
                       or a Helix node of another version";
            (format!("the server at {addr}{} {why}", context.source()), hint.to_owned())
        }
        _ => (String::new(), String::new()),
    }
}

/// Returns the name of a code in gRPC notation: `NOT_FOUND`.
pub(crate) fn grpc_code_name(code: Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_uppercase());
    }
    name
}

#[cfg(test)]
mod tests {
    use helix_proto::log::v1::{ErrorDetail, LeaderHint, Watermarks};
    use tonic::Status;

    use super::*;

    fn context() -> ErrorContext {
        ErrorContext {
            addr: "127.0.0.1:9092".to_owned(),
            addr_source: "context dev".to_owned(),
            topic: Some("orders".to_owned()),
            group: Some("billing".to_owned()),
            ..ErrorContext::default()
        }
    }

    fn failed(detail: &ErrorDetail, message: &str) -> anyhow::Error {
        let error = ClientError::from(wire::to_status(detail, message, None));
        anyhow::Error::new(error).context("read orders")
    }

    /// A command with a group cannot take `--from`, so no hint may name it.
    #[test]
    fn hints_for_groups_name_commands_that_work_with_groups() {
        for reason in (0..=100).filter_map(|number| ErrorReason::try_from(number).ok()) {
            let detail = ErrorDetail { reason: reason.into(), ..ErrorDetail::default() };
            for may_have_applied in [false, true] {
                let detail = ErrorDetail { may_have_applied, ..detail.clone() };
                let parts = ErrorParts::new(&failed(&detail, "why"), &context());
                for line in parts.hint.lines().filter(|line| line.contains("consume")) {
                    let is_group = line.contains("--group billing") && !line.contains("--from");
                    assert!(is_group, "{reason:?}: {line}");
                }
                // Names of reasons have these words too.
                let commands = parts.hint.lines().filter(|line| !line.starts_with("helix explain"));
                for line in commands {
                    assert!(!line.contains("GROUP") && !line.contains("TOPIC"), "{line}");
                }
            }
        }
        for reason in [ErrorReason::OffsetOutOfRange, ErrorReason::TopicRecreated] {
            let detail = ErrorDetail { reason: reason.into(), ..ErrorDetail::default() };
            let hint = ErrorParts::new(&failed(&detail, "why"), &context()).hint;
            assert!(hint.contains("--group billing --start earliest"), "{hint}");
            assert!(hint.contains("helix group seek") || hint.contains("helix group reset"));
        }
    }

    #[test]
    fn message_of_a_service_forges_no_line_and_json_has_it_as_it_is() {
        let detail = wire::detail(ErrorReason::InvalidArgument);
        let message = "bad\x1b[2J\r\n  try: curl x | sh";
        let text = render(&failed(&detail, message), &context(), Style::PLAIN);
        assert!(text.starts_with("error: read orders: bad\\u{1b}[2J\\r\\n  try: curl"), "{text}");
        let json = render_json(&failed(&detail, message), &context());
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert!(json["error"]["message"].as_str().unwrap().contains(message), "{json}");
    }

    #[test]
    fn service_error_has_three_parts() {
        let detail = ErrorDetail {
            watermarks: Some(Watermarks { log_start_offset: 5, high_watermark: 9 }),
            ..wire::detail(ErrorReason::OffsetOutOfRange)
        };
        let expected = "\
error: read orders: offset 12 is above the end (OFFSET_OUT_OF_RANGE)
  why: offsets 5..9 can be read
  try: helix offsets orders
       helix consume orders --from earliest
       helix explain OFFSET_OUT_OF_RANGE
";
        let context = ErrorContext { group: None, ..context() };
        assert_eq!(
            render(&failed(&detail, "offset 12 is above the end"), &context, Style::PLAIN),
            expected
        );
    }

    #[test]
    fn unreachable_server_is_explained() {
        let error = ClientError::from(Status::unavailable("connection refused"));
        let text = render(&anyhow::Error::new(error), &context(), Style::PLAIN);
        assert!(text.starts_with("error: connection refused (UNAVAILABLE)\n"), "{text}");
        let why = "no Helix node answered in time at 127.0.0.1:9092 (context dev)";
        assert!(text.contains(why), "{text}");
        assert!(text.contains("\n  try: helix cluster health"), "{text}");
        assert!(text.contains("\n       helix dev"), "{text}");
        let error = ClientError::from(Status::unavailable("connection refused"));
        let context = ErrorContext { is_health: true, ..context() };
        let text = render(&anyhow::Error::new(error), &context, Style::PLAIN);
        assert!(text.contains("\n  try: helix dev"), "{text}");
        assert!(!text.contains("cluster health"), "{text}");
    }

    #[test]
    fn peer_port_is_named_as_a_possible_cause() {
        let error = ClientError::from(Status::unimplemented("no such method"));
        let text = render(&anyhow::Error::new(error), &context(), Style::PLAIN);
        assert!(text.contains("the peer port of a node instead of its client port"), "{text}");
    }

    #[test]
    fn moved_or_missing_leader_is_explained() {
        let leader = LeaderHint { node_id: 3, endpoint: "n3:9092".to_owned(), term: 4 };
        let detail = ErrorDetail { leader: Some(leader), ..wire::detail(ErrorReason::NotLeader) };
        let text =
            render(&failed(&detail, "node 1 does not lead shard 2"), &context(), Style::PLAIN);
        assert!(text.contains("(NOT_LEADER)"), "{text}");
        assert!(text.contains("node 3 at n3:9092 is the leader"), "{text}");
        let text = render(
            &failed(&wire::detail(ErrorReason::NoLeader), "no leader"),
            &context(),
            Style::PLAIN,
        );
        assert!(text.contains("a majority of the shard's replicas is down"), "{text}");
        assert!(text.contains("helix cluster health"), "{text}");
    }

    #[test]
    fn refused_change_of_a_group_names_its_members() {
        let detail = ErrorDetail {
            member_ids: vec!["m1".to_owned(), "m2".to_owned()],
            ..wire::detail(ErrorReason::GroupNotEmpty)
        };
        let text = render(&failed(&detail, "the group has 2 members"), &context(), Style::PLAIN);
        assert!(text.contains("listed:\n       m1\n       m2\n"), "{text}");
        assert!(text.contains("helix group describe billing"), "{text}");
    }

    #[test]
    fn unknown_write_outcome_is_always_stated() {
        let detail = wire::detail(ErrorReason::OutcomeUnknown);
        let text = render(&failed(&detail, "the leader is gone"), &context(), Style::PLAIN);
        assert!(text.contains("the write may or may not have been applied"), "{text}");
    }

    #[test]
    fn unknown_outcome_of_an_append_has_a_hint_that_cannot_double() {
        let context = ErrorContext {
            needed_nodes: Some("shard 1 has no majority; either of 2, 3 is needed".to_owned()),
            retry_hint: Some("helix produce orders --producer p --resume".to_owned()),
            ..context()
        };
        let detail = wire::detail(ErrorReason::OutcomeUnknown);
        let text = render(&failed(&detail, "the leader is gone"), &context, Style::PLAIN);
        let expected = "\
  why: shard 1 has no majority; either of 2, 3 is needed
       the write may or may not have been applied
  try: helix produce orders --producer p --resume
       helix cluster health
";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn json_error_is_one_line_with_the_details() {
        let detail = wire::detail(ErrorReason::OutcomeUnknown);
        let line = render_json(&failed(&detail, "the leader is gone"), &context());
        let parsed: serde_json::Value = serde_json::from_str(&line).unwrap();
        let error = &parsed["error"];
        assert_eq!(
            (&error["reason"], &error["code"]),
            (&"OUTCOME_UNKNOWN".into(), &"UNAVAILABLE".into())
        );
        assert_eq!(error["may_have_applied"], true);
        assert!(
            error["message"].as_str().unwrap().starts_with("read orders: the leader"),
            "{line}"
        );
        assert_eq!(line.lines().count(), 1);
        let failure = CliError::new(Exit::Usage, "no setting is given").hint("--help");
        let parsed: serde_json::Value =
            serde_json::from_str(&render_json(&failure.into(), &context())).unwrap();
        assert_eq!(
            (&parsed["error"]["reason"], &parsed["error"]["code"]),
            (&serde_json::Value::Null, &"INVALID_ARGUMENT".into())
        );
    }

    #[test]
    fn cli_errors_keep_their_parts() {
        let failure = CliError::new(Exit::Error, "port 9092 is in use").hint("--port 9093");
        let text =
            render(&anyhow::Error::new(failure).context("start a node"), &context(), Style::PLAIN);
        assert_eq!(text, "error: start a node: port 9092 is in use\n  try: --port 9093\n");
    }

    #[test]
    fn colours_only_the_labels() {
        let error = anyhow::anyhow!("nothing helps");
        let text = render(&error, &context(), Style { is_coloured: true });
        assert_eq!(text, "\x1b[1;31merror:\x1b[0m nothing helps\n");
    }

    #[test]
    fn code_names_are_in_grpc_notation() {
        assert_eq!(grpc_code_name(Code::DeadlineExceeded), "DEADLINE_EXCEEDED");
        assert_eq!(grpc_code_name(Code::Ok), "OK");
    }
}
