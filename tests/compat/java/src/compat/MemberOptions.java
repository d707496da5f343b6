package compat;

import java.util.List;
import java.util.regex.Pattern;

/**
 * How a member consumes. `pattern` replaces `topics`; without `assignors` the client's own list is used, and with {@link
 * #SERVER_SIDE} alone the consumer protocol (KIP-848). `commit`: auto is the client's own commit, revoke only the revoke
 * callback, each after every record, late all that was processed, some time after partitions were taken away.
 */
record MemberOptions(
        String name,
        String group,
        List<String> topics,
        Pattern pattern,
        List<String> assignors,
        String instanceId,
        String commit,
        int sessionTimeoutMs,
        int maxPollIntervalMs) {

    static final String SERVER_SIDE = "consumer";

    MemberOptions(String name, String group) {
        this(name, group, List.of(), null, List.of(), null, "auto", Clients.SESSION_TIMEOUT_MS, 60_000);
    }

    /** The coordinator's assignor, asked for by name: only the consumer protocol (KIP-848) can. */
    static final String UNIFORM = "uniform";

    boolean isServerSide() {
        return assignors.equals(List.of(SERVER_SIDE)) || assignors.equals(List.of(UNIFORM));
    }

    /**
     * The client's own commit before partitions go one by one misses what is processed between it and the revocation, so
     * a member of such a group that wants each record once commits in the callback too.
     */
    boolean commitsWhenRevoked() {
        boolean incremental = assignors.equals(List.of("cooperative-sticky")) || isServerSide();
        return commit.equals("revoke") || commit.equals("auto") && incremental;
    }

    MemberOptions topics(String... names) {
        return with(List.of(names), pattern, assignors, instanceId, commit, sessionTimeoutMs, maxPollIntervalMs);
    }

    MemberOptions pattern(String expression) {
        Pattern compiled = Pattern.compile(expression);
        return with(topics, compiled, assignors, instanceId, commit, sessionTimeoutMs, maxPollIntervalMs);
    }

    MemberOptions assignors(String... names) {
        return with(topics, pattern, List.of(names), instanceId, commit, sessionTimeoutMs, maxPollIntervalMs);
    }

    MemberOptions instance(String id, int sessionMs) {
        return with(topics, pattern, assignors, id, commit, sessionMs, maxPollIntervalMs);
    }

    /** The coordinator decides the session of a member of the consumer protocol. */
    MemberOptions session(int milliseconds) {
        return with(topics, pattern, assignors, instanceId, commit, milliseconds, maxPollIntervalMs);
    }

    MemberOptions commit(String mode) {
        return with(topics, pattern, assignors, instanceId, mode, sessionTimeoutMs, maxPollIntervalMs);
    }

    MemberOptions maxPollInterval(int milliseconds) {
        return with(topics, pattern, assignors, instanceId, commit, sessionTimeoutMs, milliseconds);
    }

    private MemberOptions with(
            List<String> newTopics,
            Pattern newPattern,
            List<String> newAssignors,
            String newInstanceId,
            String newCommit,
            int newSessionMs,
            int newMaxPollMs) {
        return new MemberOptions(
                name,
                group,
                newTopics,
                newPattern,
                newAssignors,
                newInstanceId,
                newCommit,
                newSessionMs,
                newMaxPollMs);
    }
}
