{{/* A pod's metadata and spec. Called with (dict "root" $ "role" ROLE); role: server, or worker of a group of nodes. */}}
{{- define "trtspec.pod" -}}
{{- $role := .role -}}
{{- with .root -}}
{{- $server := fromYaml (include "trtspec.server" .) -}}
metadata:
  labels: {{- include "trtspec.labels" . | nindent 4 }}
  {{- if or (eq $role "server") .Values.podAnnotations }}
  annotations:
    {{- if eq $role "server" }}
    prometheus.io/scrape: "true"
    prometheus.io/port: {{ $server.metrics.port | quote }}
    prometheus.io/path: {{ $server.metrics.path }}
    {{- end }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add .Values.drainSeconds 25 }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: trtspec
      image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      # The image's entry point is the launcher.
      args: [{{ ternary "worker" .Values.server (eq $role "worker") }}]
      env:
        - {name: PORT, value: {{ .Values.port | quote }}}
        - {name: DRAIN_SECONDS, value: {{ .Values.drainSeconds | quote }}}
        {{- if gt (int .Values.nodes) 1 }}
        - {name: SSH_KEY, value: /etc/trtspec-key/ssh-privatekey}
        {{- end }}
        {{- with .Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if eq $role "worker" }}
      ports:
        - {name: ssh, containerPort: 2222}
      readinessProbe:
        tcpSocket: {port: ssh}
        periodSeconds: 5
      {{- else }}
      ports:
        - {name: http, containerPort: {{ .Values.port }}}
        {{- range $name, $port := $server.ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      # trtspec restarts a dead Triton or model instance itself; only its own death is the kubelet's.
      livenessProbe:
        httpGet: {path: {{ $server.live }}, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: {{ $server.ready }}, port: http}
        periodSeconds: 5
        timeoutSeconds: 6
      startupProbe:
        httpGet: {path: {{ $server.ready }}, port: http}
        periodSeconds: 5
        timeoutSeconds: 6
        failureThreshold: {{ div (add .Values.startupSeconds 4) 5 }}
      # Clients are sent elsewhere before the drain begins to refuse them.
      lifecycle:
        preStop:
          exec: {command: [sleep, "5"]}
      {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      resources:
        {{- $resources := deepCopy .Values.resources }}
        {{- if .Values.gpus }}
        {{- $gpus := dict "nvidia.com/gpu" (toString .Values.gpus) }}
        {{- $resources = merge $resources (dict "limits" $gpus) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - name: build
          mountPath: /models
          readOnly: true
          {{- with .Values.build.subPath }}
          subPath: {{ . }}
          {{- end }}
        - {name: tmp, mountPath: /tmp}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if gt (int .Values.nodes) 1 }}
        - {name: key, mountPath: /etc/trtspec-key, readOnly: true}
        {{- end }}
  volumes:
    - name: build
      persistentVolumeClaim:
        claimName: {{ required "build.claim: the PersistentVolumeClaim that holds the build folder" .Values.build.claim }}
        readOnly: true
    - name: tmp
      emptyDir: {}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
    {{- if gt (int .Values.nodes) 1 }}
    - name: key
      secret:
        secretName: {{ required "sshKeySecret: the Secret with the key that the nodes share" .Values.sshKeySecret }}
        defaultMode: 0400
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}
