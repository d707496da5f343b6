package compat;

import java.util.List;
import java.util.regex.Pattern;

/**
 * How a member consumes. `pattern` replaces `topics`; without `assignors` the client's own list is used. `commit`: auto
 * is the client's own commit, revoke only the revoke callback, each after every record.
 */
record MemberOptions(
        String name,
        String group,
        List<String> topics,
        Pattern pattern,
        List<String> assignors,
        String instanceId,
        String commit,
        int sessionTimeoutMs) {

    MemberOptions(String name, String group) {
        this(name, group, List.of(), null, List.of(), null, "auto", Clients.SESSION_TIMEOUT_MS);
    }

    MemberOptions topics(String... names) {
        return new MemberOptions(
                name, group, List.of(names), pattern, assignors, instanceId, commit, sessionTimeoutMs);
    }

    MemberOptions pattern(String expression) {
        return new MemberOptions(
                name, group, topics, Pattern.compile(expression), assignors, instanceId, commit, sessionTimeoutMs);
    }

    MemberOptions assignors(String... names) {
        return new MemberOptions(
                name, group, topics, pattern, List.of(names), instanceId, commit, sessionTimeoutMs);
    }

    MemberOptions instance(String id, int sessionMs) {
        return new MemberOptions(name, group, topics, pattern, assignors, id, commit, sessionMs);
    }

    MemberOptions commit(String mode) {
        return new MemberOptions(name, group, topics, pattern, assignors, instanceId, mode, sessionTimeoutMs);
    }
}
