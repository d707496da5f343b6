package kafka.security.minikdc;

import java.io.File;
import java.util.List;
import java.util.Properties;

/**
 * In the place of Kafka's class of this name, for which a directory server would have to be here: tests of SASL make one
 * whatever their mechanism, and start it for GSSAPI alone.
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
