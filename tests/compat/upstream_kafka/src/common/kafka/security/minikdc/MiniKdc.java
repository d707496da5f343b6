package kafka.security.minikdc;

import java.io.File;
import java.util.List;
import java.util.Properties;

/**
 * Replaces Kafka's class of this name, which needs Apache Directory on the class path. Tests of SASL call {@link
 * #createConfig} whatever their mechanism, but they start the server only for GSSAPI.
 */
public final class MiniKdc {
    public MiniKdc(Properties config, File workDir) {}

    public static Properties createConfig() {
        return new Properties();
    }

    public void start() {
        throw new UnsupportedOperationException("there is no Kerberos here");
    }

    public void stop() {}

    public void createPrincipal(File keytab, List<String> principals) {
        start();
    }
}
