package compat;

import java.io.IOException;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.kafka.clients.ApiVersions;
import org.apache.kafka.clients.ClientUtils;
import org.apache.kafka.clients.GroupRebalanceConfig;
import org.apache.kafka.clients.Metadata;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.consumer.internals.AbstractCoordinator;
import org.apache.kafka.clients.consumer.internals.ConsumerNetworkClient;
import org.apache.kafka.clients.consumer.internals.ConsumerUtils;
import org.apache.kafka.common.internals.ClusterResourceListeners;
import org.apache.kafka.common.message.JoinGroupRequestData.JoinGroupRequestProtocol;
import org.apache.kafka.common.message.JoinGroupRequestData.JoinGroupRequestProtocolCollection;
import org.apache.kafka.common.message.JoinGroupResponseData.JoinGroupResponseMember;
import org.apache.kafka.common.metrics.Metrics;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.common.utils.Timer;

/**
 * A member of a group of any protocol type. It extends the class that Connect's worker and the Schema Registry extend,
 * but its metadata and assignments are bytes of our own. A leader's assignment for a member contains the member's id,
 * so that a test can tell whose assignment arrived.
 */
final class RawMember extends AbstractCoordinator implements Runnable {
    private static final int POLL_MS = 100;
    /**
     * Long, because a client that is due to refresh its metadata sends nothing else. If that happened while the client
     * closes, it would not wait for its LeaveGroup.
     */
    private static final long METADATA_MAX_AGE_MS = 300_000;

    private final ConsumerNetworkClient network;
    private final Metrics metrics;
    private final String protocolType;
    private final Map<String, byte[]> protocols;
    private final Failures failures;
    private final AtomicInteger rounds = new AtomicInteger();
    private volatile boolean stopRequested;
    private volatile State joined;
    private Thread thread;

    /** Result of the last rebalance. `seen` has each member's metadata on the leader, and is empty on other members. */
    record State(int generation, String memberId, String protocol, byte[] assignment, Map<String, byte[]> seen) {}

    private Map<String, byte[]> seen = Map.of();

    static RawMember start(
            Clients clients, String group, String protocolType, Map<String, byte[]> protocols, Failures failures) {
        Map<String, Object> configs = clients.consumerConfigs(Map.of("group.id", group, "max.poll.interval.ms", 10_000));
        configs.put("key.deserializer", ByteArrayDeserializer.class);
        configs.put("value.deserializer", ByteArrayDeserializer.class);
        ConsumerConfig config = new ConsumerConfig(configs);
        GroupRebalanceConfig rebalance =
                new GroupRebalanceConfig(config, GroupRebalanceConfig.ProtocolType.CONSUMER);
        // The code does not name the type of the log context, which is in another package in each line of the library.
        var logContext = ConsumerUtils.createLogContext(config, rebalance);
        Metrics metrics = new Metrics();
        Metadata metadata = new Metadata(100, 1000, METADATA_MAX_AGE_MS, logContext, new ClusterResourceListeners());
        List<InetSocketAddress> addresses =
                ClientUtils.parseAndValidateAddresses(List.of(clients.bootstrap), "use_all_dns_ips");
        metadata.bootstrap(addresses);
        ConsumerNetworkClient network = ConsumerUtils.createConsumerNetworkClient(
                config, metrics, logContext, new ApiVersions(), Time.SYSTEM, metadata, metrics.sensor("throttle"), 100, null);
        RawMember member = new RawMember(rebalance, network, metrics, config, protocolType, protocols, failures);
        member.thread = new Thread(member, protocolType);
        member.thread.setDaemon(true);
        member.thread.start();
        return member;
    }

    private RawMember(
            GroupRebalanceConfig rebalance,
            ConsumerNetworkClient network,
            Metrics metrics,
            ConsumerConfig config,
            String protocolType,
            Map<String, byte[]> protocols,
            Failures failures) {
        super(rebalance, ConsumerUtils.createLogContext(config, rebalance), network, metrics, "raw", Time.SYSTEM);
        this.network = network;
        this.metrics = metrics;
        this.protocolType = protocolType;
        this.protocols = protocols;
        this.failures = failures;
    }

    @Override
    public void run() {
        try {
            while (!stopRequested) {
                ensureActiveGroup();
                pollHeartbeat(Time.SYSTEM.milliseconds());
                network.poll(Time.SYSTEM.timer(Math.min(POLL_MS, timeToNextHeartbeat(Time.SYSTEM.milliseconds()))));
            }
        } catch (RuntimeException error) {
            failures.add(protocolType + ": " + error);
        } finally {
            close();
            try {
                network.close();
            } catch (IOException error) {
                failures.add(protocolType + ": " + error);
            }
            metrics.close();
        }
    }

    /** Leave the group, and wait until the thread has ended. */
    void finish() throws InterruptedException {
        stopRequested = true;
        thread.join(Duration.ofSeconds(20).toMillis());
        Check.that(!thread.isAlive(), protocolType + " does not end");
    }

    void requestStop() {
        stopRequested = true;
    }

    /** Return the result of the last rebalance, or null while the member has no assignment. */
    State joined() {
        return joined;
    }

    int rounds() {
        return rounds.get();
    }

    static byte[] assignmentOf(String memberId) {
        byte[] id = DataScenarios.bytes(memberId);
        byte[] assignment = new byte[id.length + 3];
        assignment[0] = (byte) 0xff;
        assignment[1] = (byte) 0xfe;
        System.arraycopy(id, 0, assignment, 3, id.length);
        return assignment;
    }

    @Override
    protected String protocolType() {
        return protocolType;
    }

    @Override
    protected JoinGroupRequestProtocolCollection metadata() {
        JoinGroupRequestProtocolCollection offered = new JoinGroupRequestProtocolCollection();
        protocols.forEach((name, metadata) ->
                offered.add(new JoinGroupRequestProtocol().setName(name).setMetadata(metadata)));
        return offered;
    }

    @Override
    protected boolean onJoinPrepare(Timer timer, int generation, String memberId) {
        joined = null;
        seen = Map.of();
        return true;
    }

    @Override
    protected Map<String, ByteBuffer> onLeaderElected(
            String leaderId, String protocol, List<JoinGroupResponseMember> members, boolean skipAssignment) {
        Map<String, byte[]> metadata = new TreeMap<>();
        Map<String, ByteBuffer> assignments = new TreeMap<>();
        for (JoinGroupResponseMember member : new ArrayList<>(members)) {
            metadata.put(member.memberId(), member.metadata());
            assignments.put(member.memberId(), ByteBuffer.wrap(assignmentOf(member.memberId())));
        }
        seen = metadata;
        return assignments;
    }

    @Override
    protected void onJoinComplete(int generation, String memberId, String protocol, ByteBuffer assignment) {
        byte[] bytes = new byte[assignment.remaining()];
        assignment.get(bytes);
        rounds.incrementAndGet();
        joined = new State(generation, memberId, protocol, bytes, seen);
    }
}
